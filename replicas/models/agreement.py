"""Whether a replacement computes what it replaces."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_ROWS = 4
SAME_ROUNDINGS = {torch.float32: 1e-6, torch.bfloat16: 3e-4}
"""Relative error: sums in another order pass, a rounding more or less does not."""
FEWER_ROUNDINGS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""For a kernel that rounds once where the original rounds after each step of a few."""


def sample(width: int, like: Tensor) -> Tensor:
    """[rows, width] of values between -1 and 1 without a pattern, of the dtype of `like`."""
    count = torch.arange(_ROWS * width, device=like.device, dtype=torch.float32)
    return torch.sin(count * count).reshape(_ROWS, width).to(like.dtype)


def agree(
    actual: Tensor, expected: Tensor, tolerance: dict[torch.dtype, float] = SAME_ROUNDINGS
) -> bool:
    """Whether two results are of one shape and dtype and equal but for rounding."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    difference = (actual.float() - expected.float()).norm() / expected.float().norm()
    return float(difference) <= tolerance[expected.dtype]


def runs_and(check: Callable[[], bool]) -> bool:
    """`check()`; False where a replacement does not even run on what its original is given."""
    try:
        return check()
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return False
