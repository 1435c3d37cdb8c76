"""Tokens that may not be drawn: their scores become -inf."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kernels.gpu.launch import Launch

_CHUNK = 2048
"""Tokens to a program."""


@triton.jit
def _allow_only(scores, rows, words, VOCAB_STRIDE: tl.constexpr, CHUNK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + line).to(tl.int64)
    if row >= 0:
        token_id = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = token_id < VOCAB_STRIDE
        WORDS: tl.constexpr = (VOCAB_STRIDE + 31) // 32
        word = tl.load(words + line * WORDS + (token_id >> 5), mask=inside, other=-1)
        banned = (word >> (token_id & 31)) & 1 == 0
        lowest = tl.full([CHUNK], float("-inf"), tl.float32)
        tl.store(scores + row * VOCAB_STRIDE + token_id, lowest, mask=inside & banned)


@cache
def launch(*, vocab_size: int) -> Launch:
    """For rows of `vocab_size` scores."""
    return Launch(
        op="allow_only",
        kernel=_allow_only,
        types={"scores": "*fp32", "rows": "*i32", "words": "*i32"},
        constants={"VOCAB_STRIDE": vocab_size, "CHUNK": _CHUNK},
        num_warps=4,
    )


def allow_only(scores: Tensor, rows: Tensor, words: Tensor) -> None:
    """Put -inf in place of all scores of some rows of [B, V] float32 but of the allowed tokens.

    `rows` [A] int32 are different; negative ones are passed over. `words` [A, ceil(V / 32)] int32
    are what `allowed_words` makes. Raises ValueError on other shapes and types.
    """
    if scores.dim() != 2 or scores.dtype != torch.float32 or not scores.is_contiguous():
        raise ValueError(f"scores: {scores.dtype} {tuple(scores.shape)} is not float32 [B, V]")
    if rows.dim() != 1 or rows.dtype != torch.int32 or not rows.is_contiguous():
        raise ValueError(f"rows: {rows.dtype} {tuple(rows.shape)} is not int32 [A]")
    vocab_size = scores.shape[1]
    shape = (len(rows), triton.cdiv(vocab_size, 32))
    if words.shape != shape or words.dtype != torch.int32 or not words.is_contiguous():
        raise ValueError(f"words: {words.dtype} {tuple(words.shape)} is not int32 {shape}")
    if len(rows):
        grid = (len(rows), triton.cdiv(vocab_size, _CHUNK))
        launch(vocab_size=vocab_size)(grid, scores=scores, rows=rows, words=words)


def allowed_words(token_ids: Collection[int], vocab_size: int) -> NDArray[np.int32]:
    """One bit a token, the lowest first: [ceil(V / 32)]. Ids outside the vocabulary are passed
    over."""
    allowed = np.zeros((vocab_size + 31) // 32 * 32, np.uint8)
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    allowed[ids[(ids >= 0) & (ids < vocab_size)]] = 1
    return np.packbits(allowed, bitorder="little").view(np.int32)
