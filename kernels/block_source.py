"""The blocks that a kernel multiplies: where they lie, or copied together first."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.attention_batch import IntArray
from kernels.fp8 import movable, widen
from kernels.pool_layout import stored_transposed


class BlockSource:
    """What `blocks`, ids in a pool, are renumbered to and read as: the range that they span, or a
    gather of the distinct ones where the range has more than `max_sparseness` blocks for each."""

    def __init__(self, blocks: IntArray, max_sparseness: float, device: torch.device) -> None:
        low, high = int(blocks.min()), int(blocks.max()) + 1
        self._which: Tensor | slice = slice(low, high)
        self._buffer: Tensor | None = None
        self.numbers, self.count = blocks - low, high - low
        """Where each of `blocks` is in what `read` returns, and how many blocks that has."""
        if self.count > max_sparseness:
            used, renumbered = np.unique(blocks, return_inverse=True)
            if self.count > max_sparseness * len(used):
                self._which = torch.from_numpy(used).to(device)
                self.numbers, self.count = renumbered, len(used)

    def read(self, pool: Tensor, dtype: torch.dtype) -> Tensor:
        """`[count, kv_heads, block_size, head_dim]` in `dtype`, in the storage order of `pool` (a
        gather that also transposes costs several times a plain one). Valid until the next read:
        copies share a buffer, as fresh memory of their size costs more in page faults than the
        copying."""
        if stored_transposed(pool):
            return self._read(pool.transpose(2, 3), dtype).transpose(2, 3)
        return self._read(pool, dtype)

    def _read(self, pool: Tensor, dtype: torch.dtype) -> Tensor:
        if isinstance(self._which, slice):
            taken = pool[self._which]
            return taken if pool.dtype == dtype else widen(taken, self._room(pool, dtype))
        if pool.dtype == dtype:
            return torch.index_select(pool, 0, self._which, out=self._room(pool, dtype))
        taken = movable(pool).index_select(0, self._which).view(pool.dtype)
        return widen(taken, self._room(pool, dtype))

    def _room(self, pool: Tensor, dtype: torch.dtype) -> Tensor:
        shape = (self.count, *pool.shape[1:])
        size = self.count * pool[0].numel()
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=dtype, device=pool.device)
        return self._buffer[:size].view(shape)
