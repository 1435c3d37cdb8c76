"""Sampling, step 3: between which bins the limits of top-k and top-p fall."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.launch import Launch
from kernels.gpu.sample_math import BINS, DEEPEST, ONE, PARTS, SEGMENT

_SLACK = tl.constexpr(1e-5)
"""More than the relative error of a bin's limits in float32."""


@triton.jit
def _sample_interval(
    temperatures,
    top_ks,
    top_ps,
    counts,
    masses,
    interval,
    VOCAB_STRIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    if (temperature > 0) & ((top_k < VOCAB_STRIDE) | (top_p < 1.0)):
        place = tl.arange(0, BINS)
        count = tl.load(counts + row * BINS + place)
        reached = tl.cumsum(count, axis=0)
        wanted = tl.minimum(top_k, tl.sum(count, axis=0))
        # The bin that holds the last token that top-k keeps.
        last = tl.minimum(tl.sum((reached < wanted).to(tl.int32), axis=0), BINS - 1)
        first = last
        if top_p < 1.0:
            # A bin's tokens weigh as much as its limits say, which bounds all sums of weights.
            exponent = place.to(tl.float32) * (-DEEPEST / BINS)
            highest = (tl.exp(exponent) * ONE).to(tl.float64) * (1 + _SLACK) + 1
            lowest = (tl.exp(exponent - DEEPEST / BINS) * ONE).to(tl.float64) * (1 - _SLACK) - 1
            lowest = tl.maximum(lowest, 1.0)
            most = tl.cumsum(count * highest, axis=0)
            least = tl.cumsum(count * lowest, axis=0)
            if top_k < VOCAB_STRIDE:
                most_kept = tl.max(tl.where(place <= last, most, 0.0), axis=0)
                least_kept = tl.max(tl.where(place < last, least, 0.0), axis=0)
                needed = top_p * least_kept * (1 - _SLACK)
                ample = top_p * most_kept * (1 + _SLACK)
            else:
                part = tl.arange(0, PARTS)
                mass = tl.load(
                    masses + row * PARTS + part, mask=part * SEGMENT < VOCAB_STRIDE, other=0.0
                )
                total = tl.sum(mass, axis=0)
                needed = top_p * total
                ample = needed
                # Close to the end, what is left is known better than what came before.
                all_most, all_least = tl.max(most, axis=0), tl.max(least, axis=0)
                rest_most, rest_least = all_most - most, all_least - least
                most = tl.minimum(most, total - rest_least * (1 - _SLACK))
                least = tl.maximum(least, total - rest_most * (1 + _SLACK))
            needed = tl.maximum(needed, 1.0)
            ample = tl.maximum(ample, 1.0)
            first = tl.minimum(tl.sum((most < needed).to(tl.int32), axis=0), last)
            if top_k >= VOCAB_STRIDE:
                last = tl.minimum(tl.sum((least < ample).to(tl.int32), axis=0), BINS - 1)
        before = tl.sum(tl.where(place < first, count, 0), axis=0)
        place = interval + row * 4
        tl.store(place, first)
        tl.store(place + 1, last)
        tl.store(place + 2, before)
        tl.store(place + 3, wanted)


def launch(*, vocab_size: int) -> Launch:
    """`counts` [B, BINS] and `masses` [B, PARTS] -> `interval` int32 [B, 4]: the first and the last
    bin of the candidates, the number of tokens before them and the number that top-k keeps."""
    return Launch(
        op="sample_interval",
        kernel=_sample_interval,
        types={
            "temperatures": "*fp32",
            "top_ks": "*i32",
            "top_ps": "*fp64",
            "counts": "*i32",
            "masses": "*fp64",
            "interval": "*i32",
        },
        constants={"VOCAB_STRIDE": vocab_size},
        num_warps=8,
    )
