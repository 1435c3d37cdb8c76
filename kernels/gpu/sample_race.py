"""Sampling, step 6: the strongest of the kept tokens of each segment, by score and noise.

A token's strength is score / temperature - log(noise). Nobody in a group of 32 beats its highest
score with its leader's noise, the group's least; only groups in which that is enough to beat all
leaders of the segment need to be looked at, a few of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.launch import Launch
from kernels.gpu.sample_math import (
    GROUP,
    PARTS,
    SEGMENT,
    exponential,
    load_scores,
    noise_word,
    rank_of,
)

_ROUNDING = tl.constexpr(1e-9)
"""More than the logarithms of nearly equal numbers can be out of order by."""


@triton.jit
def _kept_scores(row_logits, token_id, threshold, VOCAB_STRIDE: tl.constexpr):
    """Scores, -inf for tokens that are not kept."""
    score = load_scores(row_logits, token_id, token_id < VOCAB_STRIDE)
    return tl.where(rank_of(score, token_id) >= threshold, score, float("-inf"))


@triton.jit
def _sample_race(
    logits,
    temperatures,
    keys,
    thresholds,
    strengths,
    winners,
    VOCAB_STRIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row).to(tl.float64)
    if temperature > 0:
        threshold = tl.load(thresholds + row)
        row_logits = logits + row * VOCAB_STRIDE
        key = keys + row * 4
        key_a = tl.load(key).to(tl.uint32, bitcast=True)
        key_b = tl.load(key + 1).to(tl.uint32, bitcast=True)
        key_c = tl.load(key + 2).to(tl.uint32, bitcast=True)
        key_d = tl.load(key + 3).to(tl.uint32, bitcast=True)

        GROUPS: tl.constexpr = SEGMENT // GROUP
        group = tl.arange(0, GROUPS)
        column = tl.arange(0, GROUP)
        token_id = (part * SEGMENT + group * GROUP)[:, None] + column[None, :]
        score = _kept_scores(row_logits, token_id, threshold, VOCAB_STRIDE)
        word = noise_word(part * GROUPS + group, key_c, key_d)
        handicap = tl.log(exponential(word) / GROUP)
        leads = column[None, :] == (word & (GROUP - 1)).to(tl.int32)[:, None]
        of_leader = tl.max(tl.where(leads, score, float("-inf")), axis=1).to(tl.float64)
        limit = tl.max(score, axis=1).to(tl.float64) / temperature - handicap
        best = tl.max(of_leader / temperature - handicap, axis=0)

        winner = tl.full([], VOCAB_STRIDE, tl.int32)
        strength = tl.full([], float("-inf"), tl.float64)
        highest = tl.max(limit, axis=0)
        while (highest > float("-inf")) & (highest >= tl.maximum(best, strength) - _ROUNDING):
            chosen = tl.min(tl.where(limit == highest, group, GROUPS), axis=0)
            limit = tl.where(group == chosen, float("-inf"), limit)
            highest = tl.max(limit, axis=0)
            runner = part * SEGMENT + chosen * GROUP + column
            own = _kept_scores(row_logits, runner, threshold, VOCAB_STRIDE).to(tl.float64)
            shared = noise_word(part * GROUPS + chosen, key_c, key_d)
            alone = exponential(noise_word(runner, key_a, key_b))
            alone = tl.where(column == (shared & (GROUP - 1)).to(tl.int32), 0.0, alone)
            reached = own / temperature - tl.log(exponential(shared) / GROUP + alone)
            most = tl.max(reached, axis=0)
            first = tl.min(tl.where(reached == most, runner, VOCAB_STRIDE), axis=0)
            wins = (most > strength) | ((most == strength) & (first < winner))
            winner = tl.where(wins, first, winner)
            strength = tl.where(wins, most, strength)
        tl.store(strengths + row * PARTS + part, strength)
        tl.store(winners + row * PARTS + part, winner)


def launch(*, vocab_size: int) -> Launch:
    """-> `strengths` float64 and `winners` int32 [B, PARTS], the lowest id among equals; -inf and
    V where no token of the segment is kept. `keys` int32 [B, 4] are the noise's, a to d."""
    return Launch(
        op="sample_race",
        kernel=_sample_race,
        types={
            "logits": "*fp32",
            "temperatures": "*fp32",
            "keys": "*i32",
            "thresholds": "*i64",
            "strengths": "*fp64",
            "winners": "*i32",
        },
        constants={"VOCAB_STRIDE": vocab_size},
        num_warps=8,
    )
