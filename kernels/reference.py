"""The oracle: paged attention in float64, one query head of one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.attention_batch import Segment


def write_reference(new: Tensor, blocks: Tensor, segments: Sequence[Segment]) -> Tensor:
    """A copy of `blocks` `[num_blocks, kv_heads, block_size, head_dim]` with the segments' `new`
    `[T, kv_heads, dim]` in their slots."""
    written = blocks.clone()
    token, block_size = 0, blocks.shape[2]
    for segment in segments:
        for position in range(segment.start, segment.start + segment.length):
            block = segment.blocks[position // block_size]
            written[block, :, position % block_size, : new.shape[2]] = new[token]
            token += 1
    return written


def paged_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    segments: Sequence[Segment],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`[T, heads, value_dim]` float64; what `dispatch.paged_attention` returns, without writing
    into the pool."""
    return attention_reference(
        query,
        write_reference(key, key_blocks, segments),
        write_reference(value, value_blocks, segments)[..., : value.shape[2]],
        segments,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )


def attention_reference(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    segments: Sequence[Segment],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`[T, heads, value_dim]` float64 of `query` `[T, heads, dim]`, over `key_blocks`
    `[num_blocks, kv_heads, block_size, >= dim]` and `value_blocks` `[..., value_dim]` that hold the
    new tokens already; slots that no query sees may hold anything."""
    tokens, heads, dim = query.shape
    block_size, value_dim = value_blocks.shape[2:]
    per_kv = heads // key_blocks.shape[1]
    keys = key_blocks[..., :dim].double().numpy()
    values = value_blocks.double().numpy()
    queries = query.double().numpy()
    output = np.zeros((tokens, heads, value_dim))
    token = 0
    for segment in segments:
        for position in range(segment.start, segment.start + segment.length):
            oldest = 0 if window is None else max(0, position - window + 1)
            seen = range(oldest, position + 1)
            blocks = [segment.blocks[p // block_size] for p in seen]
            offsets = [p % block_size for p in seen]
            for head in range(heads):
                kv_head = head // per_kv
                scores = keys[blocks, kv_head, offsets] @ queries[token, head] * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                sink = -np.inf if sinks is None else float(sinks[head])
                highest = max(sink, scores.max())
                weights = np.exp(scores - highest)
                total = weights.sum() + np.exp(sink - highest)
                output[token, head] = weights @ values[blocks, kv_head, offsets] / total
            token += 1
    return torch.from_numpy(output)
