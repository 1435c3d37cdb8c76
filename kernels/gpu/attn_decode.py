"""Split-KV attention of rows with one new token: partial results a work item."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention_shape import FP8, AttentionShape
from kernels.gpu.launch import Launch, pointer
from kernels.gpu.online_softmax import (
    HIDDEN,
    absorb_tile,
    tile_blocks,
    tile_pointers,
    tile_scores,
)
from kernels.gpu.tiles import decode_tile

MAX_PROGRAMS = 4096
"""A larger plan (`deterministic`, many rows) is worked off in strides: programs without work are
cheap, but not free."""


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    query: tl.tensor,
    key_blocks: tl.tensor,
    value_blocks: tl.tensor,
    block_table: tl.tensor,
    items: tl.tensor,
    n_items: tl.tensor,
    partials: tl.tensor,
    lse: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    table_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    QUERY_TOKEN_STRIDE: tl.constexpr,
    QUERY_HEAD_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    VDIM: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8_POOL: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0) % KV_HEADS
    first_head = tl.program_id(0) // KV_HEADS * GROUP
    group_head = first_head + tl.arange(0, ROWS)
    live = (tl.arange(0, ROWS) < GROUP) & (group_head < NUM_HEADS // KV_HEADS)
    heads = kv_head * (NUM_HEADS // KV_HEADS) + group_head
    dims, vdims = tl.arange(0, DIM), tl.arange(0, VDIM)
    keys_base = key_blocks + kv_head * HEAD_STRIDE
    values_base = value_blocks + kv_head * HEAD_STRIDE
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head)
    for item in tl.range(tl.program_id(1), tl.load(n_items), tl.num_programs(1)):
        row = tl.load(items + item * 4).to(tl.int64)
        first = tl.load(items + item * 4 + 1)
        end = tl.load(items + item * 4 + 2)
        part = tl.load(items + item * 4 + 3).to(tl.int64)
        table = block_table + row * table_stride
        q = tl.load(
            query + row * QUERY_TOKEN_STRIDE + heads[:, None] * QUERY_HEAD_STRIDE + dims[None, :],
            mask=live[:, None] & (dims[None, :] < HEAD_DIM),
            other=0.0,
        )
        if FP8_POOL:
            q = q.to(tl.float16)
        highest = tl.full([ROWS], HIDDEN, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, VDIM], tl.float32)
        aligned = first // TILE * TILE
        blocks = tile_blocks(table, aligned, end, BLOCK_SIZE, TILE)
        for start in tl.range(aligned, end, TILE):
            key_pointers = tile_pointers(
                keys_base, blocks, start, BLOCK_STRIDE, SLOT_STRIDE, BLOCK_SIZE, TILE, DIM
            )
            value_pointers = tile_pointers(
                values_base, blocks, start, BLOCK_STRIDE, SLOT_STRIDE, BLOCK_SIZE, TILE, VDIM
            )
            blocks = tile_blocks(table, start + TILE, end, BLOCK_SIZE, TILE)
            tokens = start + tl.arange(0, TILE)
            used = (tokens >= first) & (tokens < end)
            keys = tl.load(key_pointers, mask=used[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
            values = tl.load(
                value_pointers, mask=used[:, None] & (vdims[None, :] < VALUE_DIM), other=0.0
            )
            if FP8_POOL:
                keys = keys.to(tl.float16)
                values = values.to(tl.float16)
            scores = tile_scores(q, keys, scale, cap, CAPPED)
            highest, total, mixed = absorb_tile(
                scores, used[None, :], values, highest, total, mixed, True
            )
        out = mixed / total[:, None]
        if v_scale is not None:
            out *= tl.load(v_scale + kv_head)
        tl.store(
            partials + (part * NUM_HEADS + heads[:, None]) * VALUE_DIM + vdims[None, :],
            out,
            mask=live[:, None] & (vdims[None, :] < VALUE_DIM),
        )
        tl.store(lse + part * NUM_HEADS + heads, highest + tl.log2(total), mask=live)


@cache
def launch(shape: AttentionShape, *, capped: bool = False, scaled: bool | None = None) -> Launch:
    """The variant for a layer; `scaled` says whether K and V scales are given (default: FP8)."""
    scaled = shape.pool_dtype == FP8 if scaled is None else scaled
    tile = decode_tile(shape)
    types = {
        "query": pointer(shape.query_dtype),
        "key_blocks": pointer(shape.pool_dtype),
        "value_blocks": pointer(shape.pool_dtype),
        "block_table": "*i32",
        "items": "*i32",
        "n_items": "*i32",
        "partials": "*fp32",
        "lse": "*fp32",
        **({"k_scale": "*fp32", "v_scale": "*fp32"} if scaled else {}),
        "scale": "fp32",
        "cap": "fp32",
        "table_stride": "i32",
    }
    constants = {
        **({} if scaled else {"k_scale": None, "v_scale": None}),
        **shape.constants,
        "ROWS": max(16, triton.next_power_of_2(shape.group)),
        "TILE": tile.keys,
        "CAPPED": capped,
    }
    return Launch("attn_decode", _decode_kernel, types, constants, tile.num_warps, tile.num_stages)


def attn_decode(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    block_table: Tensor,
    items: Tensor,
    n_items: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with each row's one query to the tokens of its work items.

    `query` `[B, heads, head_dim]`; blocks `[num_blocks, kv_heads, block_size, head_dim]` and
    `[..., value_dim]`; `block_table` `[B, P]` int32; `items` `[N, 4]` int32 (row, first token, end
    token, partial) of which the first `n_items` `[1]` int32 count; scales `[kv_heads]` float32,
    by which stored keys and values are multiplied. Returns partials `[N, heads, value_dim]`
    float32 and the log2 of their softmax sums `[N, heads]` float32, both undefined where no item
    points. Raises ValueError for what the kernel cannot take.
    """
    shape = AttentionShape.of(query, key_blocks, value_blocks)
    shape.check_scales(k_scale, v_scale)
    if block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError("block_table is int32 with contiguous rows")
    if items.dtype != torch.int32 or items.shape[1] != 4 or not items.is_contiguous():
        raise ValueError("items are contiguous [N, 4] int32")
    partials = query.new_empty(len(items), shape.num_heads, shape.value_dim, dtype=torch.float32)
    lse = query.new_empty(len(items), shape.num_heads, dtype=torch.float32)
    scales = {} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}
    launch(shape, capped=soft_cap is not None, scaled=k_scale is not None)(
        (shape.head_programs, min(len(items), MAX_PROGRAMS)),
        query=query,
        key_blocks=key_blocks,
        value_blocks=value_blocks,
        block_table=block_table,
        items=items,
        n_items=n_items,
        partials=partials,
        lse=lse,
        **scales,
        scale=scale,
        cap=soft_cap or 0.0,
        table_stride=block_table.stride(0),
    )
    return partials, lse
