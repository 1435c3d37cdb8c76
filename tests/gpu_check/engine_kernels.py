"""What the engines of some sections launch, so that it can be compiled before: else each of them
would wait for one kernel after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels import dispatch
from kernels.attention_batch import Segment
from kernels.fp8 import FP8
from kernels.gpu import tiles
from kernels.gpu.attention_shape import AttentionShape
from kernels.gpu.attention_step import AttentionStep, plan_step
from kernels.gpu.block_copy import PAIRS
from kernels.gpu.split_plan import SplitPolicy
from kernels.head_transform import HeadTransform
from tests.gpu_check.model_sizes import SIZE_1B, SIZE_8B, SIZE_DRY, SIZE_SHALLOW, Size
from tests.gpu_check.rig import Rig
from tests.gpu_check.shapes import BLOCK_SIZE


def parts(rig: Rig) -> Iterator[Callable[[Rig], None]]:
    """Each takes a rig that compiles only; the longest come first."""
    sizes = (SIZE_DRY,) if rig.dry else (SIZE_1B, SIZE_SHALLOW, SIZE_8B)
    yield partial(_attend, size=sizes[0], fp8=True)
    yield from (partial(_attend, size=size, fp8=False) for size in sizes)
    yield from (partial(_move, size=size) for size in sizes)
    yield from (partial(_modules, size=size) for size in sizes if size is not SIZE_SHALLOW)


def _pool(rig: Rig, size: Size, dtype: torch.dtype) -> torch.Tensor:
    shape = (2, size.layers, 2, size.kv_heads, BLOCK_SIZE, size.head_dim)
    return torch.zeros(shape, dtype=dtype, device=rig.device)


def _attend(rig: Rig, size: Size, *, fp8: bool) -> None:
    """A layer of a mixed step, its queries, keys and values out of one projection."""
    heads, kv_heads = size.heads, size.kv_heads
    packed = torch.zeros(4, heads + 2 * kv_heads, size.head_dim, dtype=rig.dtype)
    query, key, value = packed.split((heads, kv_heads, kv_heads), 1)
    pool = _pool(rig, size, FP8 if fp8 else rig.dtype)
    keys, values = pool[:, 0, 0], pool[:, 0, 1]
    shape = AttentionShape.of(query, keys, values)
    planned = plan_step(
        [Segment(1, 1, (1,)), Segment(0, 3, (1,))],
        BLOCK_SIZE,
        (None,),
        max_blocks=1,
        tile_tokens=tiles.prefill_tile(shape).tokens(shape),
        policy=SplitPolicy(1),
    )
    angles = torch.zeros(4, size.head_dim, dtype=rig.dtype)
    scales = torch.ones(kv_heads) if fp8 else None
    dispatch.paged_attention(
        query,
        key,
        value,
        keys,
        values,
        AttentionStep.on(planned, rig.device),
        scale=1.0,
        k_scale=scales,
        v_scale=scales,
        heads=HeadTransform(angles, angles),
    )


def _move(rig: Rig, size: Size) -> None:
    moves, pool = dispatch.block_moves("triton"), _pool(rig, size, rig.dtype)
    count = 1
    while count <= PAIRS:
        moves.copy(pool, torch.zeros(count, 2, dtype=torch.int64))
        count *= 2
    ids = torch.zeros(1, dtype=torch.int64)
    moves.gather(pool, ids, torch.empty_like(pool))
    moves.scatter(torch.empty_like(pool), ids, pool)


def _modules(rig: Rig, size: Size) -> None:
    ops = dispatch.elementwise("triton")
    x, weight = torch.zeros(2, size.hidden, dtype=rig.dtype), torch.ones(size.hidden)
    ops.rms_norm(x, weight.to(rig.dtype), 1e-6, rounded=True)
    ops.add_rms_norm(x, x, weight.to(rig.dtype), 1e-6, rounded=True)
    ops.silu_mul(torch.zeros(2, 2 * size.intermediate, dtype=rig.dtype))
