"""Where bfloat16 arithmetic is the machine's own, not emulated."""

from __future__ import annotations

import torch

from kernels.compute_dtype import cpu_multiplies_bfloat16


def has_native_bf16(device: str) -> bool:
    """Whether `device` (`cpu` or `cuda`) multiplies bfloat16 matrices at full speed."""
    if device == "cpu":
        return cpu_multiplies_bfloat16()
    return torch.cuda.is_bf16_supported(including_emulation=False)
