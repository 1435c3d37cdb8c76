"""The slabs of other replicas of this node, searched by digest."""

from __future__ import annotations

from collections.abc import Callable, Collection

from replicas.core.block_transfer import Location
from replicas.slab import Memory, Slab

RESCAN_S = 0.05
"""A busy neighbour's index changes many times a second; older news only cost a hit."""


class _Neighbour:
    """A slab and what its index said last."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self._slots: dict[bytes, int] = {}
        self._generation: int | None = None
        self._scan_at = float("-inf")

    def find(self, digest: bytes, now: float) -> int | None:
        if now >= self._scan_at:
            # Read before the index: a change in between is then seen the next time.
            generation = self.slab.generation
            if generation != self._generation:
                self._slots = {held: slot for slot, held in self.slab.entries()}
                self._generation = generation
                self._scan_at = now + RESCAN_S
        return self._slots.get(digest)


class Neighbours:
    """Slabs by number; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slabs: dict[int, _Neighbour] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._slabs

    def add(self, number: int, slab: Slab) -> None:
        self._slabs[number] = _Neighbour(slab)

    def keep(self, numbers: Collection[int]) -> None:
        """Let go of all others, and of their memory with them."""
        self._slabs = {n: each for n, each in self._slabs.items() if n in numbers}

    def find(self, digest: bytes) -> Location | None:
        """Where the block was when last looked, at most RESCAN_S ago."""
        now = self._clock()
        for number, neighbour in self._slabs.items():
            slot = neighbour.find(digest, now)
            if slot is not None:
                return number, slot
        return None

    def read(self, source: Location, digest: bytes, into: Memory) -> bool:
        """Copy a block into `into` ([block_bytes]); False where it is not there any more."""
        number, slot = source
        neighbour = self._slabs.get(number)
        return neighbour is not None and neighbour.slab.read(slot, digest, into)
