"""Where blocks lie in host memory, by slot; which lie there is for the scheduler to decide."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from replicas.core.block_transfer import OWN_SLAB, Location
from replicas.slab import IDENTITY_BYTES, Slab

_OWN_IDENTITY = bytes(IDENTITY_BYTES)


class HostStoreError(RuntimeError):
    """No host memory can be had; the message says why."""


class HostStore(Protocol):
    """The bytes of the replica's own slab, and a look into those of its neighbours.

    For one thread. Nothing here raises because of what another process does.
    """

    num_slots: int
    block_bytes: int

    def begin(self, slot: int) -> Tensor:
        """Forget what the slot held; its bytes, to write: uint8 [block_bytes]."""
        ...

    def seal(self, slot: int, digest: bytes) -> None:
        """The slot's bytes are complete: publish them as the block `digest` (16 bytes)."""
        ...

    def drop(self, slot: int) -> None:
        """Forget what the slot held."""
        ...

    def fetch(self, source: Location, digest: bytes) -> Tensor | None:
        """The block's bytes, uint8 [block_bytes], not to be written and good until the next
        `fetch` or `begin`. None where they are not there, whole and unchanged."""
        ...

    def find(self, digest: bytes) -> Location | None:
        """Where a neighbour has the block; it may be gone by the time it is fetched."""
        ...

    def inventory(self) -> list[tuple[int, bytes]]:
        """(slot, digest) of the sealed blocks of the own slab: one taken over from a replica that
        died is not empty."""
        ...

    def close(self) -> None:
        """Give the memory up; nothing else may be called after it."""
        ...


class SlabStore:
    """A HostStore over one slab, without neighbours."""

    def __init__(self, slab: Slab) -> None:
        self.num_slots = slab.num_slots
        self.block_bytes = slab.block_bytes
        self._slab = slab
        self._blocks = torch.from_numpy(slab.blocks)

    def begin(self, slot: int) -> Tensor:
        self._slab.begin(slot)
        return self._blocks[slot]

    def seal(self, slot: int, digest: bytes) -> None:
        self._slab.seal(slot, digest)

    def drop(self, slot: int) -> None:
        self._slab.drop(slot)

    def fetch(self, source: Location, digest: bytes) -> Tensor | None:
        slab, slot = source
        if slab != OWN_SLAB or self._slab.view(slot, digest) is None:
            return None
        return self._blocks[slot]

    def find(self, digest: bytes) -> Location | None:
        return None

    def inventory(self) -> list[tuple[int, bytes]]:
        return self._slab.entries()

    def close(self) -> None:
        del self._slab, self._blocks


class InProcessStore(SlabStore):
    """A HostStore in this process' own memory, which dies with it."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        memory = np.empty(Slab.size(num_slots, block_bytes), dtype=np.uint8)
        # Touches every page now: lazy memory would run out, or be slow, in mid-stream.
        memory.fill(0)
        super().__init__(Slab.format(memory, _OWN_IDENTITY, block_bytes))
