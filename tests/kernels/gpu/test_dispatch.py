"""One call of attention, with torch and with Triton: the same output, the same pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch
from kernels.dispatch import paged_attention
from kernels.fp8 import FP8, quantise
from kernels.gpu.attention_step import AttentionStep, plan_step
from kernels.gpu.split_plan import SplitPolicy
from kernels.head_transform import HeadTransform
from tests.kernels.attention_case import AttentionCase, relative_error

LAYERS, LAYER = 2, 1
CASE = AttentionCase([(20, 1), (15, 1), (0, 5), (17, 9)], heads=4, kv_heads=2, dim=16)


def run(case: AttentionCase, *, triton: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """(output, the pool `[num_blocks, layers, 2, kv_heads, block_size, head_dim]` after it)"""
    given = case.build()
    if given.key_blocks.dtype == FP8:  # exact, as the interpreter does not round to e4m3
        key, value = (
            quantise(new, scale).to(torch.float32) * scale[:, None]
            for new, scale in ((given.key, options["k_scale"]), (given.value, options["v_scale"]))
        )
        given = replace(given, key=key, value=value)
    blocks = torch.stack((given.key_blocks, given.value_blocks), 1)
    pool = torch.zeros(len(blocks), LAYERS, *blocks.shape[1:], dtype=blocks.dtype)
    pool[:, LAYER] = blocks
    batch: Any = AttentionBatch.build(given.segments, case.block_size, "cpu")
    if triton:
        most = max(len(segment.blocks) for segment in given.segments)
        plan = plan_step(
            given.segments,
            case.block_size,
            (case.window,),
            max_blocks=most,
            tile_tokens=8,
            policy=SplitPolicy(max_items=4),
        )
        batch = AttentionStep.on(plan, "cpu")
    output = paged_attention(
        given.query,
        given.key,
        given.value,
        pool[:, LAYER, 0],
        pool[:, LAYER, 1],
        batch,
        scale=0.25,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=given.sinks,
        **options,
    )
    return output, pool


@pytest.mark.parametrize(
    "changes",
    [{}, {"value_dim": 24}, {"window": 7, "soft_cap": 3.0, "has_sinks": True}],
    ids=["plain", "wide values", "all"],
)
def test_both_give_the_same(changes: dict[str, Any]) -> None:
    case = replace(CASE, **changes)
    expected, written = run(case, triton=False)
    output, pool = run(case, triton=True)
    assert relative_error(output, expected) < 1e-5
    assert torch.equal(pool, written)


def test_both_transform_heads_alike() -> None:
    cos, sin = torch.rand(2, 16, 8)
    heads = HeadTransform(cos, sin, torch.rand(16), torch.rand(16), norm_eps=1e-6)
    expected, written = run(CASE, triton=False, heads=heads)
    output, pool = run(CASE, triton=True, heads=heads)
    assert relative_error(output, expected) < 1e-5
    assert relative_error(pool, written) < 1e-6


def test_both_use_scales_alike() -> None:
    scales = {"k_scale": torch.tensor([0.5, 0.125]), "v_scale": torch.tensor([0.25, 4.0])}
    case = replace(CASE, pool_dtype=FP8, poison=448.0)
    expected, written = run(case, triton=False, **scales)
    output, pool = run(case, triton=True, **scales)
    assert relative_error(output, expected) < 1e-3
    assert torch.equal(pool.view(torch.uint8), written.view(torch.uint8))
