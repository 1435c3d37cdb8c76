"""Sampling, step 7: the token of each row, from the best of its segments."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.launch import Launch
from kernels.gpu.sample_math import PARTS, SEGMENT


@triton.jit
def _sample_pick(
    temperatures,
    peaks,
    peak_ids,
    strengths,
    winners,
    tokens,
    VOCAB_STRIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    inside = part * SEGMENT < VOCAB_STRIDE
    part += row * PARTS
    if tl.load(temperatures + row) > 0:
        value = tl.load(strengths + part, mask=inside, other=float("-inf"))
        token_id = tl.load(winners + part, mask=inside, other=VOCAB_STRIDE)
    else:
        value = tl.load(peaks + part, mask=inside, other=float("-inf")).to(tl.float64)
        token_id = tl.load(peak_ids + part, mask=inside, other=VOCAB_STRIDE)
    best = tl.max(value, axis=0)
    token = tl.min(tl.where(inside & (value == best), token_id, VOCAB_STRIDE), axis=0)
    # A row with nothing to draw gives some token of the vocabulary.
    tl.store(tokens + row, tl.where(token < VOCAB_STRIDE, token, 0).to(tl.int64))


def launch(*, vocab_size: int) -> Launch:
    """`peaks` where the temperature is 0, `strengths` elsewhere -> `tokens` int64 [B]."""
    return Launch(
        op="sample_pick",
        kernel=_sample_pick,
        types={
            "temperatures": "*fp32",
            "peaks": "*fp32",
            "peak_ids": "*i32",
            "strengths": "*fp64",
            "winners": "*i32",
            "tokens": "*i64",
        },
        constants={"VOCAB_STRIDE": vocab_size},
        num_warps=1,
    )
