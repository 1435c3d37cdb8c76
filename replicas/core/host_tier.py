"""Which blocks are in host memory, who needs them, and which go when room runs short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from replicas.core.block_events import BlockEventLog
from replicas.core.request import ChoiceKey


@dataclass(slots=True)
class _Entry:
    slot: int
    used: int
    """When it was last wanted: a count that only grows."""
    ready: bool = False
    """Its content is complete and can be read."""
    readers: int = 0
    """Copies that read it right now."""
    owners: set[ChoiceKey] = field(default_factory=set)
    """Choices it was kept for by a preemption and that have not ended."""
    pins: set[ChoiceKey] = field(default_factory=set)
    """Owners that hold no device blocks now: they wait to get it back."""
    prefix: bool = False
    """Worth keeping beyond its owners' lives."""

    @property
    def evictable(self) -> bool:
        return self.ready and not self.readers and not self.pins


class HostTier:
    """Slots of the replica's own slab, by block digest. Bookkeeping only: it moves no bytes.

    An entry lives as long as a choice it was kept for, or as a prefix until it is the least
    recently used one and its slot is wanted. Pinned, read or half-written entries are never
    evicted, so the slots are a hard bound on the bytes: where none is to be had, `reserve`
    says so and the block is recomputed some day.

    A block is used when it is wanted, not when a copy of it ends: copies end in any order, and of
    a chain the tail is to go first, as nobody finds what lies behind a gap.
    """

    def __init__(self, num_slots: int, events: BlockEventLog | None = None) -> None:
        """`events` is told which blocks become readable, and which cease to be: not to be given
        where the blocks are private to their choices."""
        self.num_slots = num_slots
        self._events = events
        self._free = dict.fromkeys(range(num_slots - 1, -1, -1))
        """Ordered, the last to be taken first; of a list, adopting would search each time."""
        self._entries: dict[bytes, _Entry] = {}
        self._uses = 0
        self._evictable: set[bytes] = set()
        self._queue: list[tuple[int, bytes]] = []
        """A heap of (used, digest): of all that can be evicted, and of some that cannot any
        more or were used since."""
        self._pinned: set[bytes] = set()

    @property
    def num_used(self) -> int:
        """Slots that hold a block or are being written."""
        return len(self._entries)

    @property
    def num_pinned(self) -> int:
        """Blocks that preempted choices wait to get back."""
        return len(self._pinned)

    @property
    def num_free(self) -> int:
        """Slots that `reserve` can give."""
        return len(self._free) + len(self._evictable)

    @property
    def digests(self) -> Iterable[bytes]:
        """The blocks that can be read."""
        return (digest for digest, entry in self._entries.items() if entry.ready)

    def holds(self, digest: bytes) -> bool:
        """Whether the block is there or on its way."""
        return digest in self._entries

    def lookup(self, digest: bytes) -> int | None:
        """The slot to read the block from; None where it cannot be read (yet)."""
        entry = self._entries.get(digest)
        return entry.slot if entry is not None and entry.ready else None

    def adopt(self, slot: int, digest: bytes) -> None:
        """Take over a block that a slab held before this replica came. Of one that it holds twice,
        as slots keep their bytes until they are written anew, any will do."""
        if digest in self._entries:
            return
        del self._free[slot]
        entry = self._entries[digest] = _Entry(slot, self._next_use(), prefix=True)
        self._set_ready(digest, entry, True)
        self._settle(digest)

    def reserve(self, digest: bytes) -> int | None:
        """A slot to write the block to, which nobody can read before `commit`.

        None where every slot is pinned or in use by a copy.
        """
        if digest in self._entries:
            raise ValueError("the block is in the tier already")
        if not self._free and not self._evict():
            return None
        slot, _ = self._free.popitem()
        self._entries[digest] = _Entry(slot, self._next_use())
        return slot

    def touch(self, chain: Sequence[bytes]) -> None:
        """These blocks of a chain, in its order, are wanted: its tail is to be evicted before its
        head, and all that was wanted earlier before both. Unknown ones are fine."""
        for digest in reversed(chain):
            entry = self._entries.get(digest)
            if entry is not None:
                entry.used = self._next_use()
                if digest in self._evictable:
                    self._enqueue(digest, entry)

    def commit(self, digest: bytes) -> None:
        """The block has been written: it can be read from now on."""
        self._set_ready(digest, self._entries[digest], True)
        self._settle(digest)

    def discard(self, digest: bytes) -> None:
        """Forget a block whose content is not to be trusted; unknown ones are fine."""
        entry = self._entries.get(digest)
        if entry is None:
            return
        self._set_ready(digest, entry, False)
        if not entry.readers:  # else the last reader drops it
            self._drop(digest)

    def start_read(self, digest: bytes) -> None:
        """A copy begins to read the block; it stays where it is until `end_read`."""
        self._entries[digest].readers += 1
        self._evictable.discard(digest)

    def end_read(self, digest: bytes) -> None:
        """A copy has read the block."""
        entry = self._entries[digest]
        entry.readers -= 1
        if entry.ready:
            self._settle(digest)
        elif not entry.readers:
            self._drop(digest)

    def pin(self, digest: bytes, owner: ChoiceKey) -> None:
        """Keep the block until `unpin`: `owner` lost its device blocks and will come for it."""
        entry = self._entries[digest]
        entry.owners.add(owner)
        entry.pins.add(owner)
        self._pinned.add(digest)
        self._evictable.discard(digest)

    def unpin(self, digest: bytes, owner: ChoiceKey) -> None:
        """`owner` has device blocks again; the entry stays for its next preemption, unless the
        slot is wanted. Unknown ones are fine."""
        entry = self._entries.get(digest)
        if entry is not None:
            self._unpin(digest, entry, owner)
            self._settle(digest)

    def forget(self, digest: bytes, owner: ChoiceKey) -> None:
        """`owner` ended. Unknown ones are fine."""
        entry = self._entries.get(digest)
        if entry is not None:
            entry.owners.discard(owner)
            self._unpin(digest, entry, owner)
            self._settle(digest)

    def keep(self, digest: bytes) -> None:
        """The block is a prefix worth having even when no choice owns it."""
        self._entries[digest].prefix = True

    def check_integrity(
        self, owners: Iterable[ChoiceKey] = (), waiting: Iterable[ChoiceKey] = ()
    ) -> None:
        """Raise AssertionError where slots, entries and queues disagree, or where an entry
        belongs to a choice that is not among the living `owners`, or is pinned by one that is
        not among the `waiting`."""
        slots = [entry.slot for entry in self._entries.values()]
        if sorted([*slots, *self._free]) != list(range(self.num_slots)):
            raise AssertionError("used and free slots do not partition the slab")
        evictable = {digest for digest, entry in self._entries.items() if entry.evictable}
        if evictable != self._evictable:
            raise AssertionError("the evictable entries are not those counted")
        if not {(self._entries[digest].used, digest) for digest in evictable} <= {*self._queue}:
            raise AssertionError("an evictable entry is not in the queue")
        if self._pinned != {digest for digest, entry in self._entries.items() if entry.pins}:
            raise AssertionError("the pinned entries are not those counted")
        living, may_pin = set(owners), set(waiting)
        for entry in self._entries.values():
            if not entry.pins <= entry.owners:
                raise AssertionError("an entry is pinned by a choice that does not own it")
            if not entry.pins <= may_pin:
                raise AssertionError(f"pinned by who does not wait: {entry.pins - may_pin}")
            if not entry.owners <= living:
                raise AssertionError(f"ended choices own an entry: {entry.owners - living}")
            if entry.evictable and not entry.owners and not entry.prefix:
                raise AssertionError("an entry is kept for nobody")

    def _unpin(self, digest: bytes, entry: _Entry, owner: ChoiceKey) -> None:
        entry.pins.discard(owner)
        if not entry.pins:
            self._pinned.discard(digest)

    def _settle(self, digest: bytes) -> None:
        """Drop the entry or let it be evicted some day, where nothing holds it."""
        entry = self._entries[digest]
        if not entry.evictable:
            return
        if not entry.owners and not entry.prefix:
            self._drop(digest)
        elif digest not in self._evictable:
            self._evictable.add(digest)
            self._enqueue(digest, entry)

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses

    def _enqueue(self, digest: bytes, entry: _Entry) -> None:
        heappush(self._queue, (entry.used, digest))
        if len(self._queue) > 2 * self.num_slots:  # most of it is out of date
            self._queue = [(self._entries[each].used, each) for each in self._evictable]
            heapify(self._queue)

    def _evict(self) -> bool:
        """Drop the least recently used one of those that can be; False where there is none."""
        while self._queue:
            used, digest = heappop(self._queue)
            if digest in self._evictable and self._entries[digest].used == used:
                self._drop(digest)
                return True
        return False

    def _drop(self, digest: bytes) -> None:
        self._evictable.discard(digest)
        self._pinned.discard(digest)
        entry = self._entries.pop(digest)
        self._set_ready(digest, entry, False)
        self._free[entry.slot] = None

    def _set_ready(self, digest: bytes, entry: _Entry, ready: bool) -> None:
        if entry.ready is ready:
            return
        entry.ready = ready
        if self._events is not None:
            (self._events.offloaded if ready else self._events.dropped)(digest)
