"""Probabilities as whole numbers, so that sums of them are exact.

A token's weight is exp((score - peak) / temperature), rounded to a multiple of 2^-34 and
counted in these. Sums over up to 2^19 tokens are then exact in float64, whatever the order,
the block size or the device they are taken in: what is kept and what is drawn depends on a
row's own scores only. Tokens less likely than the likeliest one by 2^-35 are never drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ONE = 2.0**34
"""The weight of the likeliest token."""
DEEPEST = 24.5
"""Where (score - peak) / temperature is further down than this, the weight is 0."""
_SPAN = 256
"""Neighbouring tokens whose weights are summed before the first cumulative sum."""
_COLDEST = 1e-30
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
    """(score - peak) / temperature, for scores [R, C], their rows' maxima and temperatures [R].

    The maximum goes before the division, which could overflow.
    """
    return torch.sub(scores, peak[:, None]).div_(temperature.clamp(min=_COLDEST)[:, None])


def weigh_(exponent: Tensor) -> Tensor:
    """Turns `exponents` into weights in place: whole numbers in float32."""
    return exponent.exp_().mul_(ONE).round_()


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse of the cumulative distribution of [R, C] at `uniform` [R] (float64) -> [R] int64.

    With `uniform` at most 1 - 2^-53 the product with the total is below the total in float64
    too, so that the column drawn always has a weight above 0.
    """
    cumulative = weights.cumsum(1, dtype=torch.float64)
    return _first_above(cumulative, uniform * cumulative[:, -1])


def draw_wide(weights: Tensor, uniform: Tensor) -> Tensor:
    """The same as `draw`, faster for a whole vocabulary."""
    columns = weights.shape[1]
    missing = -columns % _SPAN
    if missing:
        weights = torch.nn.functional.pad(weights, (0, missing))
    spans = weights.unflatten(1, (-1, _SPAN))
    cumulative = spans.sum(2, dtype=torch.float64).cumsum_(1)
    target = uniform * cumulative[:, -1]
    span = _first_above(cumulative, target)
    lines = torch.arange(len(span), device=span.device)
    inside = spans[lines, span].cumsum(1, dtype=torch.float64)
    before = cumulative[lines, span] - inside[:, -1]
    # A row without any weight, which only NaN can give, would draw from the padding.
    return (span * _SPAN + _first_above(inside, target - before)).clamp_(max=columns - 1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    found = (cumulative <= target[:, None]).sum(1)
    return found.clamp_(max=cumulative.shape[1] - 1)
