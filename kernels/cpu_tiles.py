"""Decode attention as batched matrix products over blocks: `bmm`, in place where blocks are dense.

Flash decoding with the block as the split: each used block is one item of a `bmm` whose rows are
the queries of all its owners, so that a shared block is read once. Scores are then put into row
order, where one softmax a row needs no merging of maxima, and go back as weights.

For bfloat16 on CPUs that multiply it, where `bmm` reads the pool at memory speed, and for pools
whose keys are not stored transposed; else `cpu_bags`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention_batch import IntArray
from kernels.attention_params import LayerShape
from kernels.block_source import BlockSource
from kernels.decode_plan import DecodeGroup

MAX_SPARSENESS = 1.5
"""Up to this many blocks of a range for each used one, multiplying them all costs less than
gathering the used ones."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Blocks with up to `owners` owners each."""

    source: BlockSource
    """`n` blocks."""
    queries: Tensor
    """[n * kv_heads * owners] which (row, kv head) of the query multiplies which block; padding
    computes what nobody reads."""
    num_items: int
    """n * kv_heads"""
    span: slice
    """The tile's rows of all score rows."""


class BlockTiles:
    """Reads the blocks of one `DecodeGroup` for layers of one shape, in `dtype`."""

    def __init__(self, group: DecodeGroup, shape: LayerShape, dtype: torch.dtype) -> None:
        num_heads, kv_heads = shape.num_heads, shape.kv_heads
        self._shape = (group.num_rows, num_heads, group.width)
        self._block_size = shape.block_size
        self._kv_heads = kv_heads
        self._dtype = dtype
        device = group.bound.device
        per_kv = num_heads // kv_heads
        _, item, owners = np.unique(group.blocks, return_inverse=True, return_counts=True)
        # An owner count is rounded up to a power of two: at most a handful of products a layer.
        capacities = 1 << np.ceil(np.log2(owners)).astype(np.int64)
        slot = _rank_within(item)
        places = np.full(self._shape, -1, dtype=np.int64)
        tiles, base = [], 0
        kv_head, head = np.arange(kv_heads), np.arange(num_heads)
        for capacity in np.unique(capacities):
            pairs = np.flatnonzero(capacities[item] == capacity)
            source = BlockSource(group.blocks[pairs], MAX_SPARSENESS, device)
            local, count = source.numbers, source.count
            queries = np.zeros((count, kv_heads, capacity), dtype=np.int64)
            rows, columns = group.rows[pairs], group.columns[pairs]
            queries[local, :, slot[pairs]] = rows[:, None] * kv_heads + kv_head
            extent = (local[:, None] * kv_heads + head // per_kv) * capacity + slot[pairs][:, None]
            places[rows, :, columns] = base + extent * per_kv + head % per_kv
            size = int(queries.size) * per_kv
            tiles.append(
                _Tile(
                    source=source,
                    queries=torch.from_numpy(queries.reshape(-1)).to(device),
                    num_items=count * kv_heads,
                    span=slice(base, base + size),
                )
            )
            base += size
        places[places < 0] = base
        self._tiles = tuple(tiles)
        self._num_places = base + 1
        self._places = torch.from_numpy(places.reshape(-1)).to(device)

    def scores(self, query: Tensor, key_blocks: Tensor, scale: float) -> Tensor:
        """`[N, heads, width * block_size]` float32 scaled dot products of `query`
        `[N, heads, dim]`; anything where there is no pair."""
        rows, heads, width = self._shape
        dim = query.shape[2]
        per_kv = query.to(self._dtype).reshape(rows * self._kv_heads, -1)
        found = per_kv.new_zeros(self._num_places, self._block_size)
        for tile in self._tiles:
            queries = per_kv.index_select(0, tile.queries).view(tile.num_items, -1, dim)
            keys = tile.source.read(key_blocks, self._dtype)[..., :dim]
            into = found[tile.span].view(tile.num_items, -1, self._block_size)
            torch.bmm(queries, keys.transpose(2, 3).flatten(0, 1), out=into)
        # Scaled after the product: a scaled query would be rounded once more in bfloat16.
        in_order = found.index_select(0, self._places).to(torch.float32).mul_(scale)
        return in_order.view(rows, heads, width * self._block_size)

    def mix(self, weights: Tensor, value_blocks: Tensor) -> Tensor:
        """`[N, heads, pool_dim]` float32 sums of values weighted with
        `[N, heads, width * block_size]`."""
        dim = value_blocks.shape[3]
        placed = weights.new_zeros(self._num_places, self._block_size, dtype=self._dtype)
        placed.index_copy_(0, self._places, weights.view(-1, self._block_size).to(self._dtype))
        found = placed.new_zeros(self._num_places, dim)
        for tile in self._tiles:
            values = tile.source.read(value_blocks, self._dtype).flatten(0, 1)
            blocks = placed[tile.span].view(tile.num_items, -1, self._block_size)
            torch.bmm(blocks, values, out=found[tile.span].view(tile.num_items, -1, dim))
        parts = found.index_select(0, self._places).view(*self._shape, dim)
        return parts.sum(2, dtype=torch.float32)


def _rank_within(labels: IntArray) -> IntArray:
    """How many equal labels come before each."""
    order = np.argsort(labels, kind="stable")
    sorted_labels = labels[order]
    starts = np.searchsorted(sorted_labels, sorted_labels)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(labels)) - starts
    return rank
