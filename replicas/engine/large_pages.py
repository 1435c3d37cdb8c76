"""Host memory in large pages, where the system has them.

A block of the KV pool is spread over all layers: with pages of 4 KiB, copying it and attention
over it look up page after page.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from math import prod

import torch
from torch import Tensor


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros on the CPU, not empty, all of whose pages are there from the start.

    Raises:
        MemoryError: there is not so much memory.
    """
    size = prod(shape) * dtype.itemsize
    try:
        # Private: large pages for shared memory are a privilege.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no host memory for {size:,} bytes: {error}") from error
    if sys.platform == "linux":
        # A kernel that was built without them refuses; its small pages do as well, if slower.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape).zero_()
