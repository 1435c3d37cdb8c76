"""A machine whose replicas read each other's host tiers."""

from __future__ import annotations

import functools
from collections.abc import Callable

from replicas.core.block_transfer import OWN_SLAB, Location, Restore
from replicas.core.host_tier import HostTier


class Node:
    """The host tiers of one machine. Numbers of slabs are the same for all its replicas."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._tiers: list[HostTier] = []

    def join(self, tier: HostTier) -> Callable[[bytes], Location | None]:
        """Add a replica's tier; gives how that replica finds a block in the others'."""
        self._tiers.append(tier)
        return functools.partial(self._find, tier)

    def holds(self, restore: Restore) -> bool:
        """Whether what was read is still what it was: nobody keeps a neighbour's block in its
        place while it is read, and the real copier checks it afterwards."""
        slab, slot = restore.source
        return slab == OWN_SLAB or self._tiers[slab - 1].lookup(restore.digest) == slot

    def _find(self, own: HostTier, digest: bytes) -> Location | None:
        for slab, tier in enumerate(self._tiers, OWN_SLAB + 1):
            slot = None if tier is own else tier.lookup(digest)
            if slot is not None:
                return slab, slot
        return None
