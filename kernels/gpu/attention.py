"""Paged attention of a whole step on the GPU, over keys and values that the pool holds already."""

from __future__ import annotations

from torch import Tensor

from kernels.gpu.attention_step import AttentionStep
from kernels.gpu.attn_decode import attn_decode
from kernels.gpu.attn_merge import attn_merge
from kernels.gpu.attn_prefill import attn_prefill


def attend(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    step: AttentionStep,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`[T, heads, value_dim]` in the query's type: decode rows in split work items, which are
    merged, the other rows in query tiles. Rows that only fill a bucket become 0.

    `query` `[T, heads, head_dim]`; one layer's `key_blocks` `[num_blocks, kv_heads, block_size,
    head_dim]` and `value_blocks` `[..., value_dim]`, of which unused slots may hold anything. Query
    p sees keys p - window + 1 .. p; scores are `soft_cap * tanh(scale * q.k / soft_cap)`; `sinks`
    `[heads]` are logits that join the softmax denominator; `k_scale` and `v_scale` `[kv_heads]`
    float32 are what stored keys and values are multiplied by, needed where the pool is fp8. Waits
    for nothing on the host, so that a CUDA graph can hold it. Raises ValueError where shapes or
    types do not fit or the step has no plan for the window.
    """
    sizes = step.sizes
    if len(query) != sizes.num_tokens:
        raise ValueError(f"query has {len(query)} tokens, the step {sizes.num_tokens}")
    if key_blocks.shape[2] != sizes.block_size:
        raise ValueError(f"block_size is {key_blocks.shape[2]}, the step's {sizes.block_size}")
    if window not in step.splits:
        raise ValueError(f"the step is planned for windows {sizes.windows}, not {window}")
    output = query.new_empty(*query.shape[:2], value_blocks.shape[3])
    rows, splits = sizes.num_decode, step.splits[window]
    if rows:
        partials, lse = attn_decode(
            query[:rows],
            key_blocks,
            value_blocks,
            step.block_table,
            splits.items,
            splits.n_items,
            scale=scale,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        attn_merge(partials, lse, splits.row_parts, output[:rows], sinks=sinks)
    if len(step.tiles):
        attn_prefill(
            query,
            key_blocks,
            value_blocks,
            step.block_table,
            step.seq_lens,
            step.cu_q,
            step.tiles,
            output,
            tile_tokens=sizes.tile_tokens,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    return output
