"""The blocks of one KV pool: who holds them, which are cached, which comes next."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from itertools import islice

from replicas.core.block_events import BlockEventLog


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free: the caller must check `num_free` first."""


class BlockPool:
    """Reference-counted blocks 1..num_blocks; block 0 is reserved and never handed out.

    A block is *used* (count > 0), *cached* (count 0, its content still findable by hash)
    or *free*. Cached blocks are free too: they are evicted, least recently released
    first, once no uncached block is left. Uncached blocks are handed out lowest index
    first, which keeps the used ones dense: CPU attention works on the pool in place.
    """

    def __init__(self, num_blocks: int, events: BlockEventLog | None = None) -> None:
        """`events` is told which digests become findable, and which cease to be."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._events = events
        self._references = [0] * (num_blocks + 1)
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}
        self._uncached = list(range(1, num_blocks + 1))  # a heap: sorted is one
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._prized: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return len(self._uncached) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks somebody holds."""
        return self.num_blocks - self.num_free

    def references(self, block: int) -> int:
        """How many holders `block` has."""
        return self._references[block]

    @property
    def digests(self) -> Iterable[bytes]:
        """The contents that can be found."""
        return self._block_of.keys()

    def lookup(self, digest: bytes) -> int | None:
        """The block with this content, held or cached; None where there is none."""
        return self._block_of.get(digest)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, one reference each; evicts cached ones as needed."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks asked for, {self.num_free} free")
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def acquire(self, block: int) -> None:
        """Add a holder to a used or cached block."""
        if self._references[block] == 0:
            if block not in self._cached:
                raise ValueError(f"block {block} is neither used nor cached")
            del self._cached[block]
        self._references[block] += 1

    def release(self, block: int, *, cold: bool = False) -> None:
        """Take one holder away; the last one leaves the block cached or free.

        A `cold` one is the first of the cached to be evicted, instead of the last.
        """
        if self._references[block] < 1:
            raise ValueError(f"block {block} has no holder to release")
        self._references[block] -= 1
        if self._references[block]:
            return
        if self._hash_of[block] is None:
            heapq.heappush(self._uncached, block)
        else:
            self._cached[block] = None
            if cold:
                self._cached.move_to_end(block, last=False)

    def prize(self, block: int) -> None:
        """Mark the content of a published block as worth keeping after its eviction."""
        if self._hash_of[block] is not None:
            self._prized.add(block)

    def unprize(self, block: int) -> None:
        """Take the mark off again."""
        self._prized.discard(block)

    def prized_next(self, count: int, spared: Collection[int] = ()) -> list[tuple[int, bytes]]:
        """(block, digest) of the prized among the cached blocks that allocating `count`
        blocks now would evict, were the `spared` ones in use; the first to go first."""
        spared = frozenset(spared)
        cached = (block for block in self._cached if block not in spared)
        doomed = islice(cached, max(0, count - len(self._uncached)))
        pairs = ((block, self._hash_of[block]) for block in doomed if block in self._prized)
        return [(block, digest) for block, digest in pairs if digest is not None]

    def publish(self, block: int, digest: bytes, *, restored: bool = False) -> None:
        """Make a full, used block findable: a computed one, or a `restored` one.

        Where another block has this content already, that one stays the findable one.
        """
        if self._references[block] < 1 or self._hash_of[block] is not None:
            raise ValueError(f"block {block} cannot be published: unused or published before")
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest
            if self._events is not None:
                (self._events.restored if restored else self._events.stored)(digest)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless references equal `held` (block ids, one a holder) and
        used, cached and free partition the pool."""
        holders, counted = Counter(held), Counter(dict(enumerate(self._references)))
        if counted != holders:
            raise AssertionError(
                f"references without a holder: {dict(counted - holders)}, "
                f"holders without a reference: {dict(holders - counted)}"
            )
        idle = {b for b in range(1, self.num_blocks + 1) if self._references[b] == 0}
        uncached, cached = set(self._uncached), set(self._cached)
        if len(uncached) != len(self._uncached) or uncached & cached or uncached | cached != idle:
            raise AssertionError("free and cached blocks do not partition the idle ones")
        published = {b: h for b, h in enumerate(self._hash_of) if h is not None}
        if {h: b for b, h in published.items()} != self._block_of or uncached & published.keys():
            raise AssertionError("published blocks and their digests disagree")
        if not self._prized <= published.keys():
            raise AssertionError("a prized block has no digest")
        if not cached <= published.keys():
            raise AssertionError("a cached block has no digest")

    def _take(self) -> int:
        if self._uncached:
            return heapq.heappop(self._uncached)
        block, _ = self._cached.popitem(last=False)
        digest = self._hash_of[block]
        if digest is not None:
            del self._block_of[digest]
            if self._events is not None:
                self._events.removed(digest)
        self._hash_of[block] = None
        self._prized.discard(block)
        return block
