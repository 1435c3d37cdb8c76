"""Sampling, step 1: the highest score of each segment of each row."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.launch import Launch
from kernels.gpu.sample_math import BINS, PARTS, SEGMENT, load_scores


@triton.jit
def _sample_peaks(
    logits,
    peaks,
    peak_ids,
    counts,
    num_listed,
    VOCAB_STRIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token_id = part * SEGMENT + tl.arange(0, SEGMENT)
    score = load_scores(logits + row * VOCAB_STRIDE, token_id, token_id < VOCAB_STRIDE)
    peak = tl.max(score, axis=0)
    first = tl.min(tl.where(score == peak, token_id, VOCAB_STRIDE), axis=0)
    tl.store(peaks + row * PARTS + part, peak)
    tl.store(peak_ids + row * PARTS + part, first)
    if part == 0:
        # What later steps add to.
        empty = tl.zeros([BINS], tl.int32)
        tl.store(counts + row * BINS + tl.arange(0, BINS), empty)
        tl.store(num_listed + row, 0)


def launch(*, vocab_size: int) -> Launch:
    """[B, V] -> `peaks` float32 and `peak_ids` int32 [B, PARTS], the lowest id among equals;
    zeroes `counts` [B, BINS] and `num_listed` [B]."""
    return Launch(
        op="sample_peaks",
        kernel=_sample_peaks,
        types={
            "logits": "*fp32",
            "peaks": "*fp32",
            "peak_ids": "*i32",
            "counts": "*i32",
            "num_listed": "*i32",
        },
        constants={"VOCAB_STRIDE": vocab_size},
        num_warps=8,
    )
