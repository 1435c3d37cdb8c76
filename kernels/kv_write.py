"""New keys and values into their slots."""

from __future__ import annotations

from torch import Tensor

from kernels.fp8 import movable


def kv_write(new: Tensor, blocks: Tensor, token_blocks: Tensor, token_offsets: Tensor) -> None:
    """Write `new` `[T, kv_heads, dim]` to slot `(token_blocks[t], token_offsets[t])` of `blocks`
    `[num_blocks, kv_heads, block_size, head_dim]`, dim <= head_dim, in the dtype of `blocks`.

    `index_put_` over a permuted view does for both storages of `pool_layout` and is within 2x of
    the best for every T: a flat `index_copy_` wins that for values, and loses it for keys.
    """
    if new.shape[2] < blocks.shape[3]:
        blocks = blocks[..., : new.shape[2]]
    slots = movable(blocks).permute(0, 2, 1, 3)
    slots.index_put_((token_blocks, token_offsets), movable(new.to(blocks.dtype)))
