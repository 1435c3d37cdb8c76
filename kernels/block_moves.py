"""Moving whole blocks of a KV pool: what it is, and how torch does it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.fp8 import movable


class BlockMoves(Protocol):
    """Moves of blocks over all layers at once; `dispatch.block_moves` gives some.

    A pool is `[num_blocks, ...]`; ids are int64 on its device.
    """

    def copy(self, pool: Tensor, pairs: Tensor) -> None:
        """Copy within the pool: `pairs` `[n, 2]` are (source, target), all targets different. No
        pair has an earlier one's target as its source; a later one's it may have."""
        ...

    def gather(self, pool: Tensor, ids: Tensor, staging: Tensor) -> None:
        """Copy blocks `ids` `[n]` of the pool to the first n of `staging` `[>= n, ...]`."""
        ...

    def scatter(self, staging: Tensor, ids: Tensor, pool: Tensor) -> None:
        """Copy the first n blocks of `staging` to blocks `ids` `[n]` of the pool, all different."""
        ...


class TorchBlockMoves:
    """With torch's own ops, on any device."""

    def copy(self, pool: Tensor, pairs: Tensor) -> None:
        """All sources are read before any target is written."""
        sources, targets = pairs.unbind(1)
        raw = movable(pool)
        raw.index_copy_(0, targets, raw.index_select(0, sources))

    def gather(self, pool: Tensor, ids: Tensor, staging: Tensor) -> None:
        """Into contiguous `staging`."""
        torch.index_select(movable(pool), 0, ids, out=movable(staging)[: len(ids)])

    def scatter(self, staging: Tensor, ids: Tensor, pool: Tensor) -> None:
        """Out of `staging`."""
        movable(pool).index_copy_(0, ids, movable(staging)[: len(ids)])
