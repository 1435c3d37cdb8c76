"""Sampling, step 5: the rank that tokens must reach to be kept by top-k, top-p and min-p."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.launch import Launch
from kernels.gpu.sample_bins import bin_of, row_peak
from kernels.gpu.sample_candidates import CAPACITY
from kernels.gpu.sample_math import (
    NO_LIMIT,
    ONE,
    PARTS,
    SEGMENT,
    exponents,
    load_scores,
    rank_of,
    score_of_key,
    weigh,
)

_TILE = tl.constexpr(256)
"""Candidates looked at together."""
_PIVOTS = tl.constexpr(32)
"""Ranks tried together: a search ends after some seven rounds."""
_KEYS = tl.constexpr(256)
"""Scores tried together."""
_KEY_STEP = tl.constexpr(2**18)
"""Ranks to a score."""


@triton.jit
def _candidates(row, start, VOCAB_STRIDE: tl.constexpr):
    """(rank, weight) of the candidates from `start` on; a weight of 0 where there is none."""
    logits, listed, is_listed, size, first, last, peak, temperature = row
    index = start + tl.arange(0, _TILE)
    token_id = index
    if is_listed:
        token_id = tl.load(listed + index, mask=index < size, other=VOCAB_STRIDE)
    known = token_id < VOCAB_STRIDE
    score = load_scores(logits, token_id, known)
    exponent = exponents(score, peak, temperature)
    place = bin_of(exponent)
    weight = tl.where(known & (place >= first) & (place <= last), weigh(exponent), 0.0)
    return rank_of(score, token_id), weight


@triton.jit
def _span(row, VOCAB_STRIDE: tl.constexpr):
    """The lowest and the highest rank of all candidates."""
    lowest = tl.full([_TILE], 2**62, tl.int64)
    highest = tl.full([_TILE], -(2**62), tl.int64)
    for start in range(0, row[3], _TILE):
        rank, weight = _candidates(row, start, VOCAB_STRIDE)
        lowest = tl.minimum(lowest, tl.where(weight > 0, rank, 2**62))
        highest = tl.maximum(highest, tl.where(weight > 0, rank, -(2**62)))
    return tl.min(lowest, axis=0), tl.max(highest, axis=0)


@triton.jit
def _sums(
    row,
    thresholds,
    by_count,
    VOCAB_STRIDE: tl.constexpr,
):
    """For each threshold [_PIVOTS] the weight of the candidates that reach it, or their number."""
    reached = tl.zeros([_PIVOTS], tl.float64)
    for start in range(0, row[3], _TILE):
        rank, weight = _candidates(row, start, VOCAB_STRIDE)
        measure = tl.where(by_count, tl.minimum(weight, 1.0), weight).to(tl.float64)
        above = rank[None, :] >= thresholds[:, None]
        reached += tl.sum(tl.where(above, measure[None, :], 0.0), axis=1)
    return reached


@triton.jit
def _search(
    row,
    low,
    end,
    before,
    needed,
    by_count,
    VOCAB_STRIDE: tl.constexpr,
):
    """The highest rank in [low, end) from which on the measure of the candidates, with that of
    the tokens `before` them, reaches what is `needed`."""
    while end - low > 1:
        step = (end - low + _PIVOTS) // (_PIVOTS + 1)
        pivots = low + (tl.arange(0, _PIVOTS).to(tl.int64) + 1) * step
        reached = before + _sums(row, pivots, by_count, VOCAB_STRIDE)
        enough = (pivots < end) & (reached >= needed)
        steps = tl.sum(enough.to(tl.int64), axis=0)
        end = tl.minimum(end, low + (steps + 1) * step)
        low += steps * step
    return low


@triton.jit
def _least_key(least, peak, temperature):
    """The key of the lowest score with that weight or more."""
    highest = rank_of(peak, 0) >> 18
    key = tl.full([], -(2**31), tl.int64)
    for digit in tl.static_range(4):
        width = 256 ** (3 - digit)
        end = key + (tl.arange(0, _KEYS).to(tl.int64) + 1) * width - 1
        weight = weigh(exponents(score_of_key(end), peak, temperature))
        light = (end < highest) & (weight < least)
        key += tl.sum(light.to(tl.int64), axis=0) * width
    return key


@triton.jit
def _sample_threshold(
    logits,
    peaks,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    interval,
    masses,
    masses_before,
    num_listed,
    listed,
    thresholds,
    VOCAB_STRIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    by_count = tl.load(top_ks + row) < VOCAB_STRIDE
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    by_mass = top_p < 1.0
    threshold = tl.full([], NO_LIMIT, tl.int64)
    if (temperature > 0) & (by_count | by_mass | (min_p > 0)):
        peak = row_peak(peaks, row, VOCAB_STRIDE)
        least = tl.maximum((min_p * ONE).to(tl.float32), 1.0)
        threshold = _least_key(least, peak, temperature) * _KEY_STEP
        size = tl.load(num_listed + row)
        if (by_count | by_mass) & (size > 0):
            is_listed = size <= CAPACITY
            at = interval + row * 4
            them = (
                logits + row * VOCAB_STRIDE,
                listed + row * CAPACITY,
                is_listed,
                tl.where(is_listed, size, VOCAB_STRIDE),
                tl.load(at),
                tl.load(at + 1),
                peak,
                temperature,
            )
            lowest, highest = _span(them, VOCAB_STRIDE)
            part = tl.arange(0, PARTS)
            inside = part * SEGMENT < VOCAB_STRIDE
            mass = tl.load(masses + row * PARTS + part, mask=inside, other=0.0)
            before = tl.load(masses_before + row * PARTS + part, mask=inside, other=0.0)
            mass_before = tl.sum(before, axis=0)
            total = tl.sum(mass, axis=0)
            cut = lowest
            if by_count:
                count_before = tl.load(at + 2).to(tl.float64)
                wanted = tl.load(at + 3).to(tl.float64)
                cut = _search(
                    them,
                    lowest,
                    highest + 1,
                    count_before,
                    wanted,
                    True,
                    VOCAB_STRIDE,
                )
                cuts = tl.full([_PIVOTS], 0, tl.int64) + cut
                kept = _sums(them, cuts, False, VOCAB_STRIDE)
                total = mass_before + tl.max(kept, axis=0)
            if by_mass:
                cut = _search(
                    them,
                    lowest,
                    highest + 1,
                    mass_before,
                    tl.maximum(top_p * total, 1.0),
                    False,
                    VOCAB_STRIDE,
                )
            threshold = tl.maximum(threshold, cut)
    tl.store(thresholds + row, threshold)


def launch(*, vocab_size: int) -> Launch:
    """What the steps before left -> `thresholds` int64 [B], `NO_LIMIT` where all are kept."""
    return Launch(
        op="sample_threshold",
        kernel=_sample_threshold,
        types={
            "logits": "*fp32",
            "peaks": "*fp32",
            "temperatures": "*fp32",
            "top_ks": "*i32",
            "top_ps": "*fp64",
            "min_ps": "*fp64",
            "interval": "*i32",
            "masses": "*fp64",
            "masses_before": "*fp64",
            "num_listed": "*i32",
            "listed": "*i32",
            "thresholds": "*i64",
        },
        constants={"VOCAB_STRIDE": vocab_size},
        num_warps=8,
    )
