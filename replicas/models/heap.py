"""How the C library keeps memory that torch frees on CPU."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Parameters of glibc's mallopt."""
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Let this process reuse freed memory instead of handing it back to the system.

    Activations are freed and taken again in each layer; by default glibc unmaps the large ones,
    and a prefill of 512 tokens then spends a tenth of its time on page faults. Does nothing,
    and returns False, where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(
        library.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        and library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    )
