"""Decode attention as weighted sums of rows of the pool: `embedding_bag`, in place.

A score row over one block is the sum of the block's `head_dim` key rows (keys are stored
transposed, see `pool_layout`) weighted with the query; an output row is the sum of the value rows
of all its blocks weighted with the softmax. Each is one call over the whole batch that reads the
pool by index: no gather, no dense range, no merge, and a block shared by rows is no special case.

Why: a `bmm` over blocks in place multiplies 1 to 8 query rows with a 64 x 64 block, where fp32 GEMM
reaches a tenth of its peak and does not prefetch the next block. Measured (one core, fp32, 9/3
heads, D 64, block 64, cold pool): 64 x 256 tokens 0.65 of the time of `cpu_tiles`, whose scores
have to be put into row order and its partial outputs merged; 0.3 of gather + `bmm`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kernels.attention_batch import IntArray
from kernels.attention_params import LayerShape
from kernels.block_source import BlockSource
from kernels.decode_plan import DecodeGroup

MAX_SPARSENESS = 2.0
"""Up to this many blocks of a range for each used one, converting them all costs less than
gathering and converting the used ones."""

INT32_ROWS = 2**31 - 1
"""Rows that int32 can number: it halves what is read beside the pool, and must not overflow."""


class BlockBags:
    """Reads the blocks of one `DecodeGroup` for layers of one shape, in float32. Unless
    `in_place`, the used blocks are converted to float32 first, once a layer."""

    def __init__(self, group: DecodeGroup, shape: LayerShape, *, in_place: bool) -> None:
        device = group.bound.device
        sparseness = math.inf if in_place else MAX_SPARSENESS
        self._source = BlockSource(group.blocks, sparseness, device)
        self._bags = (group.num_rows, shape.num_heads, group.width)
        self._block_size = shape.block_size
        present = np.zeros((group.num_rows, 1, group.width), dtype=bool)
        present[group.rows, 0, group.columns] = True
        table = np.zeros(present.shape, dtype=_index_type(self._source, shape))
        table[group.rows, 0, group.columns] = self._source.numbers
        kv_head = np.arange(shape.num_heads)[:, None] // (shape.num_heads // shape.kv_heads)
        extents = table * shape.kv_heads + kv_head.astype(table.dtype)
        filled = np.flatnonzero(np.broadcast_to(present, self._bags))
        self._filled = None if group.full else torch.from_numpy(filled).to(device)
        self._queries = torch.from_numpy(filled // group.width).to(device)

        def index(rows_per_extent: int, used: int) -> Tensor:
            first = extents.reshape(-1)[filled, None] * rows_per_extent
            rows = first + np.arange(used, dtype=table.dtype)
            return torch.from_numpy(rows.reshape(-1)).to(device)

        def offsets(sizes: IntArray) -> Tensor:
            heads = sizes.repeat(shape.num_heads, axis=1).reshape(-1)
            return torch.from_numpy((heads.cumsum() - heads).astype(table.dtype)).to(device)

        self._value_index = index(shape.block_size, shape.block_size)
        self._key_index = self._value_index
        if not shape.pool_dim == shape.key_dim == shape.block_size:
            self._key_index = index(shape.pool_dim, shape.key_dim)
        self._key_offsets = offsets(present * shape.key_dim)
        self._value_offsets = offsets(present.sum(2, keepdims=True) * shape.block_size)

    def scores(self, query: Tensor, key_blocks: Tensor, scale: float) -> Tensor:
        """`[N, heads, width * block_size]` scaled dot products of `query` `[N, heads, key_dim]`;
        0 where there is no pair."""
        rows, heads, _ = self._bags
        if query.dtype != torch.float32:
            query = query.to(torch.float32)
        scaled = (query * scale).reshape(rows * heads, -1)
        weights = scaled.index_select(0, self._queries)
        keys = self._source.read(key_blocks, torch.float32).transpose(2, 3)
        return _weighted_sums(keys, self._key_index, self._key_offsets, weights).view(
            rows, heads, -1
        )

    def mix(self, weights: Tensor, value_blocks: Tensor) -> Tensor:
        """`[N, heads, pool_dim]` sums of values weighted with `[N, heads, width * block_size]`."""
        rows, heads, _ = self._bags
        if self._filled is not None:
            weights = weights.view(-1, self._block_size).index_select(0, self._filled)
        values = self._source.read(value_blocks, torch.float32)
        return _weighted_sums(values, self._value_index, self._value_offsets, weights).view(
            rows, heads, -1
        )


def _index_type(source: BlockSource, shape: LayerShape) -> type[np.int32] | type[np.int64]:
    rows = source.count * shape.kv_heads * max(shape.pool_dim, shape.block_size)
    return np.int32 if rows <= INT32_ROWS else np.int64


def _weighted_sums(blocks: Tensor, index: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """Bag `b` sums `weights[i]` times row `index[i]` of the contiguous `blocks`, for
    `offsets[b] <= i < offsets[b + 1]`."""
    rows, weights = blocks.view(-1, blocks.shape[3]), weights.view(-1)
    return torch.embedding_bag(rows, index, offsets, mode=0, per_sample_weights=weights)[0]
