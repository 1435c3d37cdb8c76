"""A step's keys and values into their slots, with what models do to heads before: RMS norm,
rotary embedding, FP8 quantisation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Launch, pointer

_TILE = 1024
"""Elements to a program, unless one head has more."""
_FP8_LIMIT = tl.constexpr(448.0)
"""The largest float8_e4m3fn; what is above would become NaN."""


@triton.jit
def _transformed(
    heads,
    inside,
    column,
    norm,
    eps,
    cos,
    sin,
    DIM: tl.constexpr,
    ROT_DIM: tl.constexpr,
):
    """Heads [TILE, D] after norm and rotation in float32, from pointers to heads [TILE, 1]."""
    mask = inside[:, None] & (column < DIM)[None, :]
    x = tl.load(heads + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if norm is not None:
        spread = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        weight = tl.load(norm + column, mask=column < DIM, other=0.0).to(tl.float32)
        x = x * spread * weight[None, :]
    if cos is not None:
        HALF: tl.constexpr = ROT_DIM // 2
        turned = column < ROT_DIM
        partner = tl.where(column < HALF, column + HALF, column - HALF)
        paired = inside[:, None] & turned[None, :]
        other = tl.load(heads + partner[None, :], mask=paired, other=0.0).to(tl.float32)
        if norm is not None:
            weight = tl.load(norm + partner, mask=turned, other=0.0).to(tl.float32)
            other = other * spread * weight[None, :]
        cosine = tl.load(cos + column, mask=turned, other=1.0).to(tl.float32)
        sine = tl.load(sin + column, mask=turned, other=0.0).to(tl.float32)
        sine = tl.where(column < HALF, -sine, sine)
        x = x * cosine[None, :] + other * sine[None, :]
    return x


@triton.jit
def _stored(x, scale, head, inside, element: tl.constexpr):
    """What a pool of `element` holds for heads [TILE, D]."""
    if scale is not None:
        by_head = tl.load(scale + head, mask=inside, other=1.0)[:, None]
        x = tl.clamp(tl.div_rn(x, tl.broadcast_to(by_head, x.shape)), -_FP8_LIMIT, _FP8_LIMIT)
    return x.to(element)


@triton.jit
def _kv_write(
    query,
    key,
    value,
    output,
    key_blocks,
    value_blocks,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    k_scale,
    v_scale,
    eps,
    QUERY_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    POOL_DIM: tl.constexpr,
    ROT_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    if cos is not None:
        cos += token * ROT_DIM
        sin += token * ROT_DIM
    Q_PARTS: tl.constexpr = (HEADS + TILE - 1) // TILE
    if query is not None and part < Q_PARTS:
        head = part * TILE + tl.arange(0, TILE)
        inside = head < HEADS
        heads = query + token * QUERY_STRIDE + (head * DIM)[:, None]
        x = _transformed(heads, inside, column, q_norm, eps, cos, sin, DIM, ROT_DIM)
        places = output + token * (HEADS * DIM) + (head * DIM)[:, None] + column[None, :]
        mask = inside[:, None] & (column < DIM)[None, :]
        tl.store(places, x.to(output.dtype.element_ty), mask=mask)
    slot = tl.load(slots + token).to(tl.int64)
    if (part >= Q_PARTS) & (slot >= 0):
        head = (part - Q_PARTS) * TILE + tl.arange(0, TILE)
        inside = head < KV_HEADS
        inner = (slot // BLOCK_SIZE) * BLOCK_STRIDE + (slot % BLOCK_SIZE) * POOL_DIM
        heads = key + token * KEY_STRIDE + (head * DIM)[:, None]
        x = _transformed(heads, inside, column, k_norm, eps, cos, sin, DIM, ROT_DIM)
        places = key_blocks + inner + (head * HEAD_STRIDE)[:, None] + column[None, :]
        mask = inside[:, None] & (column < DIM)[None, :]
        tl.store(places, _stored(x, k_scale, head, inside, key_blocks.dtype.element_ty), mask)

        value_column = tl.arange(0, VALUE_COLUMNS)
        mask = inside[:, None] & (value_column < VALUE_DIM)[None, :]
        heads = value + token * VALUE_STRIDE + (head * VALUE_DIM)[:, None]
        x = tl.load(heads + value_column[None, :], mask=mask, other=0.0).to(tl.float32)
        places = value_blocks + inner + (head * HEAD_STRIDE)[:, None] + value_column[None, :]
        x = _stored(x, v_scale, head, inside, value_blocks.dtype.element_ty)
        tl.store(places, x, mask=mask)


@cache
def launch(
    *,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    rope_dtype: torch.dtype | None,
    norm_dtype: torch.dtype | None,
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    rot_dim: int,
    block_size: int,
    pool_dim: int,
    block_stride: int,
    head_stride: int,
    token_strides: tuple[int, int, int],
) -> Launch:
    """For one layer of a model: what `kv_write` is given, `token_strides` those of query, key
    and value. Without `rope_dtype` and `norm_dtype` queries stay as they are."""
    types = {"key": pointer(dtype), "value": pointer(dtype)}
    types |= {"key_blocks": pointer(pool_dtype), "value_blocks": pointer(pool_dtype)}
    types |= {"slots": "*i64", "eps": "fp32"}
    changes = rope_dtype is not None or norm_dtype is not None
    optional = {
        ("query", "output"): dtype if changes else None,
        ("cos", "sin"): rope_dtype,
        ("q_norm", "k_norm"): norm_dtype,
        ("k_scale", "v_scale"): torch.float32 if pool_dtype == torch.float8_e4m3fn else None,
    }
    constants: dict[str, int | None] = {}
    for names, kind in optional.items():
        if kind is None:
            constants |= dict.fromkeys(names)
        else:
            types |= dict.fromkeys(names, pointer(kind))
    columns = triton.next_power_of_2(dim)
    most = triton.next_power_of_2(max(heads, kv_heads))
    constants |= {
        "QUERY_STRIDE": token_strides[0] if changes else 0,
        "KEY_STRIDE": token_strides[1],
        "VALUE_STRIDE": token_strides[2],
        "BLOCK_STRIDE": block_stride,
        "HEAD_STRIDE": head_stride,
        "HEADS": heads if changes else 0,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "POOL_DIM": pool_dim,
        "ROT_DIM": rot_dim,
        "BLOCK_SIZE": block_size,
        "TILE": max(1, min(most, _TILE // columns)),
        "COLUMNS": columns,
        "VALUE_COLUMNS": triton.next_power_of_2(value_dim),
    }
    return Launch(op="kv_write", kernel=_kv_write, types=types, constants=constants, num_warps=4)


def kv_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    slots: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Write keys and values to their slots; returns the query as attention is to see it.

    `query` `[T, heads, dim]`, `key` `[T, kv_heads, dim]`, `value` `[T, kv_heads, value_dim]` of
    one type, each token's heads contiguous (views of a fused projection will do). The blocks are
    a layer's `[num_blocks, kv_heads, block_size, pool_dim]` with pool_dim no less than either
    dim, both with the same strides, slots contiguous. `slots` `[T]` int64 is block * block_size +
    offset; where it is negative nothing is written.

    Heads of query and key are normed by `q_norm`, `k_norm` `[dim]` and then rotated by halves
    over the first rot_dim dimensions by `cos`, `sin` `[T, rot_dim]` (Su et al., "RoFormer",
    2021), in float32, rounded once. A float8_e4m3fn pool needs `k_scale`, `v_scale` float32
    `[kv_heads]`: it holds x / scale, clamped to +-448. Raises ValueError on other shapes.
    """
    optional = {"cos": cos, "sin": sin, "q_norm": q_norm, "k_norm": k_norm}
    optional |= {"k_scale": k_scale, "v_scale": v_scale}
    _check_heads(query, key, value, slots)
    _check_blocks(key, value, key_blocks, value_blocks)
    _check_optional(query, key, optional)
    if (k_scale is not None) != (key_blocks.dtype == torch.float8_e4m3fn):
        raise ValueError(f"k_scale: given for float8_e4m3fn only, the pool is {key_blocks.dtype}")
    made = launch(
        dtype=query.dtype,
        pool_dtype=key_blocks.dtype,
        rope_dtype=None if cos is None else cos.dtype,
        norm_dtype=None if q_norm is None else q_norm.dtype,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        dim=key.shape[2],
        value_dim=value.shape[2],
        rot_dim=0 if cos is None else cos.shape[1],
        block_size=key_blocks.shape[2],
        pool_dim=key_blocks.shape[3],
        block_stride=key_blocks.stride(0),
        head_stride=key_blocks.stride(1),
        token_strides=(query.stride(0), key.stride(0), value.stride(0)),
    )
    given: dict[str, Tensor | float] = {"key": key, "value": value, "slots": slots, "eps": eps}
    given |= {"key_blocks": key_blocks, "value_blocks": value_blocks}
    given |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    output = query
    if made.constants["HEADS"]:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        given |= {"query": query, "output": output}
    tile = made.constants["TILE"]
    parts = triton.cdiv(made.constants["HEADS"], tile) + triton.cdiv(key.shape[1], tile)
    if len(query):
        made((len(query), parts), **given)
    return output


def _check_heads(query: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    for name, heads in {"query": query, "key": key, "value": value}.items():
        if heads.dim() != 3 or heads.stride()[1:] != (heads.shape[2], 1):
            raise ValueError(f"{name}: {tuple(heads.shape)} is not [T, heads, dim], heads packed")
        if len(heads) != len(query) or heads.dtype != query.dtype:
            raise ValueError(f"{name}: {len(heads)} tokens of {heads.dtype} beside the query's")
    if query.shape[2] != key.shape[2] or value.shape[1] != key.shape[1]:
        raise ValueError(f"key: {tuple(key.shape)} fits neither query nor value")
    if slots.shape != (len(query),) or slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots: {slots.dtype} {tuple(slots.shape)} is not int64 [{len(query)}]")


def _check_blocks(key: Tensor, value: Tensor, key_blocks: Tensor, value_blocks: Tensor) -> None:
    _, kv_heads, _, pool_dim = key_blocks.shape
    if kv_heads != key.shape[1] or pool_dim < max(key.shape[2], value.shape[2]):
        raise ValueError(f"key_blocks: {tuple(key_blocks.shape)} hold no {tuple(key.shape)}")
    if key_blocks.stride()[2:] != (pool_dim, 1):
        raise ValueError("key_blocks: the slots of a head are not contiguous")
    if value_blocks.shape != key_blocks.shape or value_blocks.stride() != key_blocks.stride():
        raise ValueError("value_blocks: not laid out as key_blocks are")
    if value_blocks.dtype != key_blocks.dtype:
        raise ValueError(f"value_blocks: {value_blocks.dtype}, key_blocks {key_blocks.dtype}")


def _check_optional(query: Tensor, key: Tensor, optional: Mapping[str, Tensor | None]) -> None:
    rot_dim = 0 if optional["cos"] is None else optional["cos"].shape[-1]
    if rot_dim % 2 or rot_dim > key.shape[2]:
        raise ValueError(f"cos: {rot_dim} dimensions of {key.shape[2]} cannot be rotated")
    shapes = {"cos": (len(query), rot_dim), "q_norm": key.shape[2:], "k_scale": key.shape[1:2]}
    for first, second in (("cos", "sin"), ("q_norm", "k_norm"), ("k_scale", "v_scale")):
        one, other = optional[first], optional[second]
        if (one is None) != (other is None):
            raise ValueError(f"{second}: goes with {first}")
        if one is None or other is None:
            continue
        for name, tensor in {first: one, second: other}.items():
            if tensor.shape != shapes[first] or not tensor.is_contiguous():
                raise ValueError(f"{name}: {tuple(tensor.shape)} is not {tuple(shapes[first])}")
            if tensor.dtype != one.dtype:
                raise ValueError(f"{name}: {tensor.dtype} beside {one.dtype}")
