"""Where bfloat16 arithmetic is the machine's own, not emulated."""

from __future__ import annotations

import torch


def has_native_bf16(device: str) -> bool:
    """Whether `device` (`cpu` or `cuda`) multiplies bfloat16 matrices at full speed."""
    if device == "cpu":
        features = torch.cpu.get_capabilities()
        return bool(features.get("avx512_bf16") or features.get("amx_bf16"))
    return torch.cuda.is_bf16_supported(including_emulation=False)
