"""Moves blocks between the pool and host memory: what is under way, and who holds what for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from replicas.core.block_pool import BlockPool
from replicas.core.block_transfer import OWN_SLAB, EndedCopy, Location, Restore, Save
from replicas.core.host_tier import HostTier
from replicas.core.request import Choice, ChoiceState


class Offloader:
    """Queues copies for the next step and takes in those that ended.

    A copy holds a reference to its device block, and a reader's mark on its host slot, from
    the moment it is queued until it has ended: so a block is free only when the copy that
    reads it has completed, and readable only when the copy that fills it has.
    """

    def __init__(
        self,
        pool: BlockPool,
        tier: HostTier,
        find_neighbour: Callable[[bytes], Location | None] = lambda _: None,
    ) -> None:
        """`find_neighbour` says where another replica's slab has a block."""
        self.tier = tier
        self._pool = pool
        self._find_neighbour = find_neighbour
        self._queued: list[Save | Restore] = []
        self._under_way: set[Save | Restore] = set()
        self._arriving: Counter[bytes] = Counter()
        self.num_spilled = 0
        """Saves of cached blocks so far."""
        self._cold: set[bytes] = set()
        """Digests of saves of cached blocks: these go back to where they were in the LRU."""

    @property
    def num_copies(self) -> int:
        """Copies queued or under way."""
        return len(self._under_way)

    @property
    def num_queued_saves(self) -> int:
        """Saves that have not ended: a further one would wait for them."""
        return sum(1 for copy in self._under_way if isinstance(copy, Save))

    @property
    def num_queued_restores(self) -> int:
        """Restores that have not ended."""
        return len(self._under_way) - self.num_queued_saves

    @property
    def num_leaving_blocks(self) -> int:
        """Blocks that nobody holds but copies: they come free when these have ended."""
        return sum(1 for copy in self._under_way if self._pool.references(copy.block) == 1)

    def held_blocks(self) -> list[int]:
        """Device blocks of all copies, one entry a copy."""
        return [copy.block for copy in self._under_way]

    def find(self, digest: bytes) -> Location | None:
        """Where in host memory the block can be read from."""
        slot = self.tier.lookup(digest)
        return self._find_neighbour(digest) if slot is None else (OWN_SLAB, slot)

    def is_arriving(self, digest: bytes) -> bool:
        """Whether a device block is being filled with the content."""
        return digest in self._arriving

    def swap_out(self, choice: Choice, full_blocks: int) -> int:
        """Keep the KV of a choice's first `full_blocks` blocks for its return; gives the number
        of those that are kept: where the tier is full, the tail is given up.

        The choice still holds its blocks: the saves take references of their own.
        """
        saves: list[Save] = []
        chain, kept = choice.block_hashes[:full_blocks], 0
        self.tier.touch(chain)  # room for one block of it is not to be made by evicting another
        for block, digest in zip(choice.blocks, chain, strict=False):
            if not self.tier.holds(digest):
                slot = self.tier.reserve(digest)
                if slot is None:
                    break
                saves.append(Save(block, slot, digest))
            self.tier.pin(digest, choice.key)
            choice.host_blocks.add(digest)
            kept += 1
        # The tail comes free first, so that it is evicted first.
        for save in reversed(saves):
            self._hold(save)
        return kept

    def spill(self, doomed: Sequence[tuple[int, bytes]]) -> int:
        """Write what the tier lacks of cached blocks (block, digest) that are about to be evicted,
        the first to go first; gives the number of copies. Where the tier is full, those that go
        first are given up: the tails of chains."""
        saves: list[Save] = []
        chain = [digest for _, digest in reversed(doomed)]
        self.tier.touch(chain)
        for block, digest in reversed(doomed):
            if not self.tier.holds(digest):
                slot = self.tier.reserve(digest)
                if slot is None:
                    continue
                saves.append(Save(block, slot, digest))
                self._cold.add(digest)
            self.tier.keep(digest)
        self.tier.touch(chain)
        for save in reversed(saves):
            self._hold(save)
        self.num_spilled += len(saves)
        return len(saves)

    def restore(self, source: Location, block: int, digest: bytes) -> None:
        """Fill a newly allocated block."""
        if source[0] == OWN_SLAB:
            self.tier.start_read(digest)
        self._arriving[digest] += 1
        self._hold(Restore(source, block, digest))

    def unpin(self, choice: Choice) -> None:
        """The choice runs again: what it left on the host need not stay there."""
        for digest in choice.host_blocks:
            self.tier.unpin(digest, choice.key)

    def repin(self, choice: Choice) -> int:
        """The choice lost its blocks again before it had them back; gives how many are left."""
        held = [digest for digest in choice.host_blocks if self.tier.lookup(digest) is not None]
        for digest in held:
            self.tier.pin(digest, choice.key)
        return len(held)

    def forget(self, choice: Choice) -> None:
        """The choice ended."""
        for digest in choice.host_blocks:
            self.tier.forget(digest, choice.key)
        choice.host_blocks.clear()

    def take(self) -> tuple[Save | Restore, ...]:
        """The copies to start now, in their order."""
        copies = tuple(self._queued)
        self._queued.clear()
        return copies

    def end(self, ended: Sequence[EndedCopy]) -> None:
        """Let go of what ended copies held. Call it after the restored blocks' choices, who
        hold references of their own, have been told."""
        # The cold ones in reverse: each goes before the others in the pool's LRU.
        warm = [each for each in ended if not self._is_cold(each)]
        for each in [*warm, *filter(self._is_cold, reversed(ended))]:
            copy = each.copy
            self._under_way.remove(copy)
            if isinstance(copy, Save):
                self._end_save(copy, each.ok)
            else:
                self._end_restore(copy, each.ok)

    def check_integrity(self, living: Sequence[Choice]) -> None:
        """Raise AssertionError where the tier's books are wrong."""
        waiting = [choice.key for choice in living if choice.state is ChoiceState.WAITING]
        self.tier.check_integrity((choice.key for choice in living), waiting)

    def _hold(self, copy: Save | Restore) -> None:
        self._pool.acquire(copy.block)
        self._queued.append(copy)
        self._under_way.add(copy)

    def _is_cold(self, ended: EndedCopy) -> bool:
        return ended.copy.digest in self._cold

    def _end_save(self, save: Save, ok: bool) -> None:
        self._pool.release(save.block, cold=save.digest in self._cold)
        self._cold.discard(save.digest)
        if ok:
            self.tier.commit(save.digest)
        else:
            self.tier.discard(save.digest)

    def _end_restore(self, restore: Restore, ok: bool) -> None:
        self._pool.release(restore.block)
        self._arriving -= Counter((restore.digest,))
        if restore.source[0] != OWN_SLAB:
            return
        self.tier.end_read(restore.digest)
        if not ok:
            self.tier.discard(restore.digest)
