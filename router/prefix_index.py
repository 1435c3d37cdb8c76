"""Which replica probably holds which prefix: what was sent where, bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Block digests a replica was sent, least recently used ones dropped first.

    Memory is bounded by `capacity` digests a replica, whatever the traffic's history.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def insert(self, replica: str, chain: Sequence[bytes]) -> None:
        """Note that `replica` computes, or has, the blocks of `chain`."""
        held = self._held.setdefault(replica, OrderedDict())
        # The tail first: a chain is worth nothing without its head, so the head goes last.
        for digest in reversed(chain):
            held[digest] = None
            held.move_to_end(digest)
        while len(held) > self._capacity:
            held.popitem(last=False)

    def match(self, replica: str, chain: Sequence[bytes]) -> int:
        """Leading blocks of `chain` that `replica` holds."""
        held = self._held.get(replica, OrderedDict[bytes, None]())
        for count, digest in enumerate(chain):
            if digest not in held:
                return count
        return len(chain)

    def drop(self, replica: str) -> None:
        """Forget a replica that has gone."""
        self._held.pop(replica, None)

    def __len__(self) -> int:
        return sum(len(held) for held in self._held.values())
