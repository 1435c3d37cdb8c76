"""Sampling, step 2: how many tokens of each row fall in each bin of neighbouring weights, and the
total weight of each segment."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.launch import Launch
from kernels.gpu.sample_math import BINS, DEEPEST, PARTS, SEGMENT, exponents, load_scores, weigh


@triton.jit
def bin_of(exponent):
    """The bin, 0 for the likeliest, of exponents in [-`DEEPEST`, 0]."""
    return tl.minimum((exponent * (-BINS / DEEPEST)).to(tl.int32), BINS - 1)


@triton.jit
def row_peak(peaks, row, VOCAB_STRIDE: tl.constexpr):
    """The highest score of a row, from those of its segments."""
    part = tl.arange(0, PARTS)
    return tl.max(
        tl.load(
            peaks + row * PARTS + part, mask=part * SEGMENT < VOCAB_STRIDE, other=float("-inf")
        ),
        axis=0,
    )


@triton.jit
def _sample_bins(
    logits,
    peaks,
    temperatures,
    top_ks,
    top_ps,
    counts,
    masses,
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
        found = tl.histogram(bin_of(exponent), BINS, mask=weight > 0)
        place = tl.arange(0, BINS)
        tl.atomic_add(counts + row * BINS + place, found, mask=found > 0, sem="relaxed")
        tl.store(masses + row * PARTS + part, tl.sum(weight.to(tl.float64), axis=0))


def launch(*, vocab_size: int) -> Launch:
    """Adds to `counts` int32 [B, BINS] and fills `masses` float64 [B, PARTS] of rows with top-k or
    top-p."""
    return Launch(
        op="sample_bins",
        kernel=_sample_bins,
        types={
            "logits": "*fp32",
            "peaks": "*fp32",
            "temperatures": "*fp32",
            "top_ks": "*i32",
            "top_ps": "*fp64",
            "counts": "*i32",
            "masses": "*fp64",
        },
        constants={"VOCAB_STRIDE": vocab_size},
        num_warps=8,
    )
