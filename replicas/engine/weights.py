"""Probabilities as whole numbers, so that sums of them are exact.

A token's weight is exp((score - peak) / temperature), rounded to a multiple of 2^-34 and
counted in these. Sums over up to 2^19 tokens are then exact in float64, whatever the order,
the block size or the device they are taken in: what truncation keeps depends on a row's own
scores only. It never keeps a token less likely than the likeliest one by 2^-35.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ONE = 2.0**34
"""The weight of the likeliest token."""
DEEPEST = 24.5
"""Where (score - peak) / temperature is further down than this, the weight is 0."""
COLDEST = 1e-30
"""Lower temperatures would be denormal or zero in float32; greedy already at this one."""
_CPU_SLICE, _CUDA_SLICE = 2**18, 2**26
"""Elements worked on at once: temporaries stay in the cache, or in bounded memory."""


def row_slices(scores: Tensor) -> Iterator[slice]:
    """Consecutive slices of the rows of [R, V], sized for work over whole rows."""
    rows, vocab_size = scores.shape
    elements = _CPU_SLICE if scores.device.type == "cpu" else _CUDA_SLICE
    step = max(1, elements // vocab_size)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def exponents(scores: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """(score - peak) / temperature, for scores [R, C], their rows' maxima and temperatures [R],
    at least `COLDEST`.

    The maximum goes before the division, which could overflow.
    """
    return torch.sub(scores, peak[:, None]).div_(temperature[:, None])


def weigh_(exponent: Tensor) -> Tensor:
    """Turns `exponents` into weights in place: whole numbers in float32."""
    return exponent.exp_().mul_(ONE).round_()
