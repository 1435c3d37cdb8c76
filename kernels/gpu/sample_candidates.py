"""Sampling, step 4: lists the tokens in the bins where limits fall, and weighs those before."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.launch import Launch
from kernels.gpu.sample_bins import bin_of, row_peak
from kernels.gpu.sample_math import PARTS, SEGMENT, exponents, load_scores, weigh

CAPACITY = tl.constexpr(16384)
"""Candidates of a row that are listed; where there are more, step 5 goes through the row."""


@triton.jit
def _sample_candidates(
    logits,
    peaks,
    temperatures,
    top_ks,
    top_ps,
    interval,
    masses_before,
    num_listed,
    listed,
    VOCAB_STRIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    by_count = tl.load(top_ks + row) < VOCAB_STRIDE
    by_mass = tl.load(top_ps + row) < 1.0
    if (temperature > 0) & (by_count | by_mass):
        peak = row_peak(peaks, row, VOCAB_STRIDE)
        token_id = part * SEGMENT + tl.arange(0, SEGMENT)
        score = load_scores(logits + row * VOCAB_STRIDE, token_id, token_id < VOCAB_STRIDE)
        exponent = exponents(score, peak, temperature)
        weight = weigh(exponent)
        place = bin_of(exponent)
        first = tl.load(interval + row * 4)
        last = tl.load(interval + row * 4 + 1)
        before = tl.where(place < first, weight, 0.0).to(tl.float64)
        tl.store(masses_before + row * PARTS + part, tl.sum(before, axis=0))
        between = (weight > 0) & (place >= first) & (place <= last)
        rise = tl.cumsum(between.to(tl.int32), axis=0)
        # In which order segments come makes no difference: ranks are all different.
        start = tl.atomic_add(num_listed + row, tl.max(rise, axis=0), sem="relaxed")
        position = start + rise - 1
        fits = between & (position < CAPACITY)
        tl.store(listed + row * CAPACITY + position, token_id, mask=fits)


def launch(*, vocab_size: int) -> Launch:
    """Adds to `num_listed` int32 [B] and `listed` int32 [B, CAPACITY]; fills `masses_before`
    float64 [B, PARTS] with the weight of all tokens before the interval."""
    return Launch(
        op="sample_candidates",
        kernel=_sample_candidates,
        types={
            "logits": "*fp32",
            "peaks": "*fp32",
            "temperatures": "*fp32",
            "top_ks": "*i32",
            "top_ps": "*fp64",
            "interval": "*i32",
            "masses_before": "*fp64",
            "num_listed": "*i32",
            "listed": "*i32",
        },
        constants={"VOCAB_STRIDE": vocab_size},
        num_warps=8,
    )
