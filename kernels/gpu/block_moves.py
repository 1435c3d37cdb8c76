"""Moves of blocks, by Triton's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from kernels import variants
from kernels.gpu import block_copy as copying
from kernels.gpu import block_gather as gathering
from kernels.gpu.block_copy import PAIRS, block_copy
from kernels.gpu.block_gather import block_gather, block_scatter
from kernels.gpu.launch import Launch


class TritonBlockMoves:
    """`kernels.block_moves.BlockMoves` of a pool whose blocks are contiguous.

    Raises VariantError where a variant would be needed that is not listed.
    """

    def copy(self, pool: Tensor, pairs: Tensor) -> None:
        """In launches of `PAIRS`. A block that one launch overwrites is no source of a later one:
        it was given away only after its last copy had been listed."""
        _require(pool[0].nbytes, pool.device)
        for first in range(0, len(pairs), PAIRS):
            block_copy(pool, pairs[first : first + PAIRS])

    def gather(self, pool: Tensor, ids: Tensor, staging: Tensor) -> None:
        """Into contiguous `staging`."""
        _require(pool[0].nbytes, pool.device)
        block_gather(pool, ids, staging)

    def scatter(self, staging: Tensor, ids: Tensor, pool: Tensor) -> None:
        """Out of `staging`."""
        _require(pool[0].nbytes, pool.device)
        block_scatter(staging, ids, pool)


def launches(words: int) -> Iterator[Launch]:
    """All that blocks of `words` int64 may be moved by."""
    yield gathering.launch(words=words, scatter=False)
    yield gathering.launch(words=words, scatter=True)
    pairs = 1
    while pairs <= PAIRS:
        yield copying.launch(words=words, pairs=pairs)
        pairs *= 2


@cache
def _require(block_bytes: int, device: torch.device) -> None:
    variants.require_all(launches(block_bytes // 8), device)
