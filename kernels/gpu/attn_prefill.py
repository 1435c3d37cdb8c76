"""Attention of segments with several new tokens: chunks of prompts, ragged."""

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
    LOG2_E,
    absorb_tile,
    tile_blocks,
    tile_pointers,
    tile_scores,
)
from kernels.gpu.tiles import prefill_tile


@triton.jit
def _absorb_range(
    q: tl.tensor,
    positions: tl.tensor,
    table: tl.tensor,
    keys_base: tl.tensor,
    values_base: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    VDIM: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8_POOL: tl.constexpr,
) -> tl.tensor:
    """Take the keys at `low` (a multiple of TILE) .. `high - 1` into the running softmax; all
    rows see all of them unless MASKED."""
    dims, vdims = tl.arange(0, DIM), tl.arange(0, VDIM)
    blocks = tile_blocks(table, low, high, BLOCK_SIZE, TILE)
    for start in tl.range(low, high, TILE):
        key_pointers = tile_pointers(
            keys_base, blocks, start, BLOCK_STRIDE, SLOT_STRIDE, BLOCK_SIZE, TILE, DIM
        )
        value_pointers = tile_pointers(
            values_base, blocks, start, BLOCK_STRIDE, SLOT_STRIDE, BLOCK_SIZE, TILE, VDIM
        )
        blocks = tile_blocks(table, start + TILE, high, BLOCK_SIZE, TILE)
        tokens = start + tl.arange(0, TILE)
        key_mask = dims[None, :] < HEAD_DIM
        value_mask = vdims[None, :] < VALUE_DIM
        seen = tokens[None, :] <= positions[:, None]
        if MASKED:
            key_mask &= tokens[:, None] < high
            value_mask &= tokens[:, None] < high
            seen &= tokens[None, :] < high
            if WINDOWED:
                seen &= tokens[None, :] > positions[:, None] - window
        keys = tl.load(key_pointers, mask=key_mask, other=0.0)
        values = tl.load(value_pointers, mask=value_mask, other=0.0)
        if FP8_POOL:
            keys = keys.to(tl.float16)
            values = values.to(tl.float16)
        scores = tile_scores(q, keys, scale, cap, CAPPED)
        highest, total, mixed = absorb_tile(scores, seen, values, highest, total, mixed, MASKED)
    return highest, total, mixed


@triton.jit(do_not_specialize=["table_stride", "window"])
def _prefill_kernel(
    query: tl.tensor,
    key_blocks: tl.tensor,
    value_blocks: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    cu_q: tl.tensor,
    tiles: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    window: tl.tensor,
    table_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
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
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8_POOL: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0) % KV_HEADS
    first_head = tl.program_id(0) // KV_HEADS * GROUP
    row = tl.load(tiles + tl.program_id(1) * 2).to(tl.int64)
    first = tl.load(tiles + tl.program_id(1) * 2 + 1)
    begin = tl.load(cu_q + row)
    length = tl.load(cu_q + row + 1) - begin
    before = tl.load(seq_lens + row) - length
    # A row of the tile is a token and one of the heads that share its keys.
    token = first + tl.arange(0, ROWS) // GROUP
    group_head = first_head + tl.arange(0, ROWS) % GROUP
    live = (tl.arange(0, ROWS) < TILE_TOKENS * GROUP) & (token < length)
    live &= group_head < NUM_HEADS // KV_HEADS
    heads = kv_head * (NUM_HEADS // KV_HEADS) + group_head
    tokens = (begin + token).to(tl.int64)
    dims, vdims = tl.arange(0, DIM), tl.arange(0, VDIM)
    q = tl.load(
        query
        + tokens[:, None] * QUERY_TOKEN_STRIDE
        + heads[:, None] * QUERY_HEAD_STRIDE
        + dims[None, :],
        mask=live[:, None] & (dims[None, :] < HEAD_DIM),
        other=0.0,
    )
    if FP8_POOL:
        q = q.to(tl.float16)
    if k_scale is not None:
        scale *= tl.load(k_scale + kv_head)
    table = block_table + row * table_stride
    keys_base = key_blocks + kv_head * HEAD_STRIDE
    values_base = value_blocks + kv_head * HEAD_STRIDE
    highest = tl.full([ROWS], HIDDEN, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VDIM], tl.float32)
    positions = before + token
    oldest_query = before + first
    newest_query = before + tl.minimum(first + TILE_TOKENS, length) - 1
    # All rows see the keys in [full_low, full_high); what is left of it is cut by the window,
    # what is right of it by causality.
    full_low = 0
    full_high = (oldest_query + 1) // TILE * TILE
    if WINDOWED:
        low = tl.maximum(oldest_query - window + 1, 0) // TILE * TILE
        full_low = (tl.maximum(newest_query - window + 1, 0) + TILE - 1) // TILE * TILE
        full_high = tl.maximum(full_low, full_high)
        highest, total, mixed = _absorb_range(
            q, positions, table, keys_base, values_base,
            low, tl.minimum(full_low, newest_query + 1), window, scale, cap, highest, total, mixed,
            HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_STRIDE, SLOT_STRIDE, TILE, DIM, VDIM,
            True, WINDOWED, CAPPED, FP8_POOL,
        )  # fmt: skip
    highest, total, mixed = _absorb_range(
        q, positions, table, keys_base, values_base, full_low, full_high,
        window, scale, cap, highest, total, mixed,
        HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_STRIDE, SLOT_STRIDE, TILE, DIM, VDIM,
        False, WINDOWED, CAPPED, FP8_POOL,
    )  # fmt: skip
    highest, total, mixed = _absorb_range(
        q, positions, table, keys_base, values_base, full_high, newest_query + 1,
        window, scale, cap, highest, total, mixed,
        HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_STRIDE, SLOT_STRIDE, TILE, DIM, VDIM,
        True, WINDOWED, CAPPED, FP8_POOL,
    )  # fmt: skip
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * LOG2_E
        raised = tl.maximum(highest, sink)
        kept = tl.exp2(highest - raised)
        mixed *= kept[:, None]
        total = total * kept + tl.exp2(sink - raised)
    out = mixed / tl.where(live, total, 1.0)[:, None]
    if v_scale is not None:
        out *= tl.load(v_scale + kv_head)
    tl.store(
        output + (tokens[:, None] * NUM_HEADS + heads[:, None]) * VALUE_DIM + vdims[None, :],
        out.to(output.dtype.element_ty),
        mask=live[:, None] & (vdims[None, :] < VALUE_DIM),
    )


@cache
def launch(
    shape: AttentionShape,
    *,
    tile_tokens: int | None = None,
    windowed: bool = False,
    capped: bool = False,
    scaled: bool | None = None,
    sinks_dtype: torch.dtype | None = None,
) -> Launch:
    """The variant for a layer. `tile_tokens` are the tokens of a query tile as planned (default:
    `prefill_tile(shape).tokens`); `scaled` says whether K and V scales are given (default: FP8)."""
    scaled = shape.pool_dtype == FP8 if scaled is None else scaled
    tile = prefill_tile(shape)
    tile_tokens = tile.tokens(shape) if tile_tokens is None else tile_tokens
    types = {
        "query": pointer(shape.query_dtype),
        "key_blocks": pointer(shape.pool_dtype),
        "value_blocks": pointer(shape.pool_dtype),
        "block_table": "*i32",
        "seq_lens": "*i32",
        "cu_q": "*i32",
        "tiles": "*i32",
        **({} if sinks_dtype is None else {"sinks": pointer(sinks_dtype)}),
        "output": pointer(shape.query_dtype),
        **({"k_scale": "*fp32", "v_scale": "*fp32"} if scaled else {}),
        "scale": "fp32",
        "cap": "fp32",
        "window": "i32",
        "table_stride": "i32",
    }
    constants = {
        **({"sinks": None} if sinks_dtype is None else {}),
        **({} if scaled else {"k_scale": None, "v_scale": None}),
        **shape.constants,
        "TILE_TOKENS": tile_tokens,
        "ROWS": max(16, triton.next_power_of_2(tile_tokens * shape.group)),
        "TILE": tile.keys,
        "WINDOWED": windowed,
        "CAPPED": capped,
    }
    return Launch(
        "attn_prefill", _prefill_kernel, types, constants, tile.num_warps, tile.num_stages
    )


def attn_prefill(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    tiles: Tensor,
    output: Tensor,
    *,
    tile_tokens: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Fill the rows of `output` `[T, heads, value_dim]` that `tiles` name, and return it.

    `query` `[T, heads, head_dim]`; blocks `[num_blocks, kv_heads, block_size, head_dim]` and
    `[..., value_dim]`; `block_table` `[B, P]`, `seq_lens` `[B]` (new tokens included), `cu_q`
    `[B + 1]` (row b has new tokens `cu_q[b]` .. `cu_q[b + 1] - 1`) and `tiles` `[M, 2]` (row, its
    first new token; `tile_tokens` each) int32; scales `[kv_heads]` float32. The query at position
    p sees p - window + 1 .. p. Raises ValueError for what the kernel cannot take.
    """
    shape = AttentionShape.of(query, key_blocks, value_blocks)
    shape.check_scales(k_scale, v_scale)
    if output.shape != (len(query), shape.num_heads, shape.value_dim) or not output.is_contiguous():
        raise ValueError(f"output is contiguous [T, {shape.num_heads}, {shape.value_dim}]")
    if output.dtype != query.dtype:
        raise ValueError(f"output is {output.dtype}, query {query.dtype}")
    for name, index in (("block_table", block_table), ("seq_lens", seq_lens), ("cu_q", cu_q),
                        ("tiles", tiles)):  # fmt: skip
        if index.dtype != torch.int32 or index.stride(-1) != 1:
            raise ValueError(f"{name} is int32 and contiguous")
    if sinks is not None and sinks.shape != (shape.num_heads,):
        raise ValueError(f"sinks are [{shape.num_heads}], one a query head")
    variant = launch(
        shape,
        tile_tokens=tile_tokens,
        windowed=window is not None,
        capped=soft_cap is not None,
        scaled=k_scale is not None,
        sinks_dtype=None if sinks is None else sinks.dtype,
    )
    variant(
        (shape.head_programs, len(tiles)),
        query=query,
        key_blocks=key_blocks,
        value_blocks=value_blocks,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_q=cu_q,
        tiles=tiles,
        **({} if sinks is None else {"sinks": sinks}),
        output=output,
        **({} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}),
        scale=scale,
        cap=soft_cap or 0.0,
        window=window or 0,
        table_stride=block_table.stride(0),
    )
    return output
