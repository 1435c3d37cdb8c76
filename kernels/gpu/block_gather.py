"""Blocks of the pool into a contiguous staging buffer, which one transfer takes to the host."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.block_words import words_of
from kernels.gpu.launch import Launch

_CHUNK = 2048
"""Words that a program moves."""


@triton.jit
def _block_gather(pool, ids, staging, BLOCK_STRIDE: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(ids + row).to(tl.int64)
    word = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = word < BLOCK_STRIDE
    content = tl.load(pool + block * BLOCK_STRIDE + word, mask=mask)
    tl.store(staging + row * BLOCK_STRIDE + word, content, mask=mask)


@triton.jit
def _block_scatter(pool, ids, staging, BLOCK_STRIDE: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(ids + row).to(tl.int64)
    word = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = word < BLOCK_STRIDE
    content = tl.load(staging + row * BLOCK_STRIDE + word, mask=mask)
    tl.store(pool + block * BLOCK_STRIDE + word, content, mask=mask)


@cache
def launch(*, words: int, scatter: bool) -> Launch:
    """For blocks of `words` int64."""
    return Launch(
        op="block_scatter" if scatter else "block_gather",
        kernel=_block_scatter if scatter else _block_gather,
        types={"pool": "*i64", "ids": "*i64", "staging": "*i64"},
        constants={"BLOCK_STRIDE": words, "CHUNK": _CHUNK},
        num_warps=8,
    )


def block_gather(pool: Tensor, ids: Tensor, staging: Tensor) -> None:
    """Copy blocks `ids` `[n]` int64 of `pool` `[blocks, ...]` to `staging` `[>= n, ...]`.

    Both are contiguous, of any types whose blocks have as many bytes. Raises ValueError on
    other shapes and types.
    """
    _move(pool, ids, staging, scatter=False)


def block_scatter(staging: Tensor, ids: Tensor, pool: Tensor) -> None:
    """Copy the first n blocks of `staging` to blocks `ids` `[n]` of `pool`, all different: what
    `block_gather` did, backwards."""
    _move(pool, ids, staging, scatter=True)


def _move(pool: Tensor, ids: Tensor, staging: Tensor, *, scatter: bool) -> None:
    words, staged = words_of(pool, "pool"), words_of(staging, "staging")
    if ids.dim() != 1 or ids.dtype != torch.int64:
        raise ValueError(f"ids: {ids.dtype} {tuple(ids.shape)} is not int64 [n]")
    if staged.shape[1] != words.shape[1]:
        raise ValueError(f"staging: {staged.shape[1]} words a block, {words.shape[1]} in the pool")
    if len(ids) > len(staged):
        raise ValueError(f"ids: {len(ids)} blocks, staging has room for {len(staged)}")
    if len(ids) == 0:
        return
    made = launch(words=words.shape[1], scatter=scatter)
    grid = (len(ids), triton.cdiv(words.shape[1], _CHUNK))
    made(grid, pool=words, ids=ids.contiguous(), staging=staged)
