"""Blocks as rows of 64-bit words: copies need not know what they move."""

from __future__ import annotations

import torch
from torch import Tensor


def words_of(blocks: Tensor, name: str) -> Tensor:
    """`[n, ...]` contiguous, of any type -> `[n, words]` int64 in the same memory.

    Raises ValueError, naming the argument, unless a block is contiguous and a multiple of
    16 bytes, so that it can be moved in the widest accesses.
    """
    if blocks.dim() < 2 or not blocks.is_contiguous():
        raise ValueError(f"{name}: not a contiguous tensor of blocks")
    flat = blocks.view(len(blocks), -1)
    if flat.shape[1] * flat.element_size() % 16:
        raise ValueError(f"{name}: blocks of {flat.shape[1] * flat.element_size()} bytes, not 16n")
    return flat.view(torch.int64)
