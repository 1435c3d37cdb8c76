"""Whole blocks of the pool copied onto others, for choices that part from a shared block."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.block_words import words_of
from kernels.gpu.launch import Launch

PAIRS = 32
"""Pairs that one launch can take: each program holds its part of all sources."""
_CHUNK = 256
"""Words of each block that a program moves."""


@triton.jit(do_not_specialize=["n_pairs"])
def _block_copy(
    pool,
    pairs,
    n_pairs,
    BLOCK_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    pair = tl.arange(0, PAIRS)
    wanted = pair < n_pairs
    source = tl.load(pairs + 2 * pair, mask=wanted, other=0).to(tl.int64)
    target = tl.load(pairs + 2 * pair + 1, mask=wanted, other=0).to(tl.int64)
    word = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = wanted[:, None] & (word < BLOCK_STRIDE)[None, :]
    content = tl.load(pool + (source * BLOCK_STRIDE)[:, None] + word[None, :], mask=mask)
    # A block may be read here and written by another thread.
    tl.debug_barrier()
    tl.store(pool + (target * BLOCK_STRIDE)[:, None] + word[None, :], content, mask=mask)


@cache
def launch(*, words: int, pairs: int) -> Launch:
    """For `pairs` copies at most (a power of two) of blocks of `words` int64."""
    return Launch(
        op="block_copy",
        kernel=_block_copy,
        types={"pool": "*i64", "pairs": "*i64", "n_pairs": "i32"},
        constants={"BLOCK_STRIDE": words, "PAIRS": pairs, "CHUNK": _CHUNK},
        num_warps=8 if pairs > 8 else 4,
    )


def block_copy(pool: Tensor, pairs: Tensor) -> None:
    """Copy blocks within `pool` `[blocks, ...]`, contiguous, any type, over all layers at once.

    `pairs` `[n, 2]` int64 on the pool's device are (source, target) with n <= `PAIRS` and all
    targets different. Every source is read before any target is written: programs share no words,
    each has its own range of them in all the blocks.
    Raises ValueError on other shapes and types.
    """
    words = words_of(pool, "pool")
    if pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.dtype != torch.int64:
        raise ValueError(f"pairs: {pairs.dtype} {tuple(pairs.shape)} is not int64 [n, 2]")
    if len(pairs) > PAIRS:
        raise ValueError(f"pairs: {len(pairs)} are more than {PAIRS} at a time")
    if len(pairs) == 0:
        return
    size = words.shape[1]
    made = launch(words=size, pairs=triton.next_power_of_2(len(pairs)))
    made((triton.cdiv(size, _CHUNK),), pool=words, pairs=pairs.contiguous(), n_pairs=len(pairs))
