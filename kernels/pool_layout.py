"""How a layer's blocks lie in memory.

Keys and values are both `[num_blocks, kv_heads, block_size, head_dim]`. On CPU the keys should be
a transposed view: their storage is `[num_blocks, kv_heads, head_dim, block_size]`, so that
`cpu_bags` can read scores as sums of contiguous rows. Every kernel takes either storage.
"""

from __future__ import annotations

from torch import Tensor


def transposed_keys(memory: Tensor) -> Tensor:
    """Contiguous memory `[num_blocks, kv_heads, block_size, head_dim]` as keys of that shape that
    are stored transposed. Whole blocks may still be copied within `memory` itself."""
    num_blocks, kv_heads, block_size, head_dim = memory.shape
    return memory.view(num_blocks, kv_heads, head_dim, block_size).transpose(2, 3)


def stored_transposed(blocks: Tensor) -> bool:
    """Whether `blocks` are as `transposed_keys` makes them."""
    return blocks.transpose(2, 3).is_contiguous()
