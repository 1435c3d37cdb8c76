"""In which dtype attention multiplies."""

from __future__ import annotations

from functools import cache

import torch


@cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 dot products. Without, torch emulates them at a tenth of the
    speed of float32."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def compute_dtype(query: torch.Tensor, blocks: torch.Tensor) -> torch.dtype:
    """float32, unless query and pool are of one narrower dtype that the device multiplies.

    Where it does, `torch.bmm` rounds its results to that dtype, scores included.
    """
    native = query.device.type != "cpu" or (
        query.dtype == torch.bfloat16 and cpu_multiplies_bfloat16()
    )
    return query.dtype if native and query.dtype == blocks.dtype else torch.float32
