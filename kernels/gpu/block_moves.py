"""Moves of blocks, by Triton's kernels."""

from __future__ import annotations

from torch import Tensor

from kernels.gpu.block_copy import PAIRS, block_copy
from kernels.gpu.block_gather import block_gather, block_scatter


class TritonBlockMoves:
    """`kernels.block_moves.BlockMoves` of a pool whose blocks are contiguous."""

    def copy(self, pool: Tensor, pairs: Tensor) -> None:
        """In launches of `PAIRS`. A block that one launch overwrites is no source of a later one:
        it was given away only after its last copy had been listed."""
        for first in range(0, len(pairs), PAIRS):
            block_copy(pool, pairs[first : first + PAIRS])

    def gather(self, pool: Tensor, ids: Tensor, staging: Tensor) -> None:
        """Into contiguous `staging`."""
        block_gather(pool, ids, staging)

    def scatter(self, staging: Tensor, ids: Tensor, pool: Tensor) -> None:
        """Out of `staging`."""
        block_scatter(staging, ids, pool)
