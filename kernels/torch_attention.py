"""Paged attention with torch alone, on any device: which of the kernels here does which rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch, DecodeRows, PrefillSegment
from kernels.attention_params import AttentionParams, LayerShape
from kernels.compute_dtype import compute_dtype
from kernels.cpu_bags import BlockBags
from kernels.cpu_decode import BlockReader, attend_decode
from kernels.cpu_prefill import attend_causal, attend_tiled, gather_context
from kernels.cpu_tiles import BlockTiles
from kernels.decode_plan import DecodeGroup, plan_decode
from kernels.fp8 import converted, quantise
from kernels.kv_write import kv_write
from kernels.pool_layout import stored_transposed

FLASH_TOKENS = 1024
"""Fresh tokens from which on flash attention beats tiles."""


def write_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    batch: AttentionBatch,
    params: AttentionParams,
) -> Tensor:
    """What `dispatch.paged_attention` does, with the same shapes."""
    if params.k_scale is None or params.v_scale is None:
        return _attend(query, key, value, key_blocks, value_blocks, batch, params)
    # Scores are linear in the query and outputs in the values: with the scales in these, every
    # path reads stored values as they are.
    per_kv = query.shape[1] // key.shape[1]
    scaled = query.to(torch.float32) * params.k_scale.repeat_interleave(per_kv)[:, None]
    key, value = quantise(key, params.k_scale), quantise(value, params.v_scale)
    mixed = _attend(scaled, key, value, key_blocks, value_blocks, batch, params)
    return mixed.mul_(params.v_scale.repeat_interleave(per_kv)[:, None]).to(query.dtype)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    batch: AttentionBatch,
    params: AttentionParams,
) -> Tensor:
    kv_write(key, key_blocks, batch.token_blocks, batch.token_offsets)
    kv_write(value, value_blocks, batch.token_blocks, batch.token_offsets)
    layer = _Layer(
        query=query,
        key_blocks=key_blocks,
        value_blocks=value_blocks,
        value_dim=value.shape[2],
        batch=batch,
        params=params,
        dtype=compute_dtype(query, key_blocks),
    )
    readers = layer.readers(batch.decode) if batch.decode is not None else ()
    if len(readers) == 1 and readers[0][0].tokens is None:
        return layer.decode(*readers[0])
    output = query.new_empty(*query.shape[:2], value.shape[2])
    for group, reader in readers:
        output[group.tokens] = layer.decode(group, reader)
    for segment in batch.prefill:
        layer.prefill(segment, key, value, output)
    return output


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's attention over blocks that hold the new tokens already."""

    query: Tensor
    key_blocks: Tensor
    value_blocks: Tensor
    value_dim: int
    batch: AttentionBatch
    params: AttentionParams
    dtype: torch.dtype

    def readers(self, rows: DecodeRows) -> tuple[tuple[DecodeGroup, BlockReader], ...]:
        """The decode rows in groups, each with what reads its blocks; made once a step for all
        layers of one shape."""
        keys, window = self.key_blocks, self.params.window
        shape = (self.query.shape[1:], keys.shape[1:], keys.stride(), keys.dtype)

        def make() -> tuple[tuple[DecodeGroup, BlockReader], ...]:
            return tuple((group, self._reader(group)) for group in self._groups(rows))

        return self.batch.shared(("readers", window, self.dtype, shape), make)

    def _groups(self, rows: DecodeRows) -> tuple[DecodeGroup, ...]:
        batch, window = self.batch, self.params.window
        return plan_decode(rows, batch.num_tokens, batch.block_size, window, self.query.device)

    def _reader(self, group: DecodeGroup) -> BlockReader:
        """Bags where float32 can be read as rows of transposed keys, else tiles."""
        shape = LayerShape(
            num_heads=self.query.shape[1],
            kv_heads=self.key_blocks.shape[1],
            key_dim=self.query.shape[2],
            pool_dim=self.key_blocks.shape[3],
            block_size=self.batch.block_size,
        )
        keys, values = self.key_blocks, self.value_blocks
        readable = stored_transposed(keys) and values.is_contiguous()
        if self.dtype == torch.float32 and readable:
            in_place = keys.dtype == values.dtype == torch.float32
            return BlockBags(group, shape, in_place=in_place)
        return BlockTiles(group, shape, self.dtype)

    def decode(self, group: DecodeGroup, reader: BlockReader) -> Tensor:
        """`[N, heads, value_dim]` of the group's rows."""
        query, tokens = self.query, group.tokens
        if tokens is not None:
            query = query.index_select(0, tokens)
        mixed = attend_decode(query, self.key_blocks, self.value_blocks, group, reader, self.params)
        return mixed[..., : self.value_dim].to(query.dtype)

    def prefill(self, segment: PrefillSegment, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Fill the segment's rows of `output`. Where nothing precedes them, the step's `key` and
        `value` are read rather than the pool, rounded to it so that chunks make no difference."""
        query, output = self.query[segment.tokens].to(self.dtype), output[segment.tokens]
        if segment.start == 0:
            stored = self.key_blocks.dtype
            keys = converted(key[segment.tokens].to(stored), self.dtype).transpose(0, 1)
            values = converted(value[segment.tokens].to(stored), self.dtype).transpose(0, 1)
        else:
            keys, values = self._context(segment, len(query))
        if self._is_plain(segment, len(query)) and query.shape[2] == values.shape[2]:
            output.copy_(attend_causal(query, keys, values, self.params.scale))
        else:
            attend_tiled(query, keys, values, self.batch, self.params, output)

    def _context(self, segment: PrefillSegment, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the blocks that the segment sees, up to its end."""
        size, first = self.batch.block_size, 0
        if self.params.window is not None:
            first = max(0, segment.start - self.params.window + 1) // size
        table, end = segment.blocks[first:], segment.start + length - first * size
        keys = gather_context(self.key_blocks, table, self.dtype)[:, :end]
        values = gather_context(self.value_blocks, table, self.dtype)[:, :end]
        return keys[..., : self.query.shape[2]], values[..., : self.value_dim]

    def _is_plain(self, segment: PrefillSegment, length: int) -> bool:
        """Whether flash attention can do it and is worth it."""
        params = self.params
        unbounded = params.window is None or params.window >= length
        bare = params.soft_cap is None and params.sinks is None
        return segment.start == 0 and length >= FLASH_TOKENS and unbounded and bare
