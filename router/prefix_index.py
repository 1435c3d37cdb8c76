"""Which replica holds which blocks, in which tier: what the replicas say, and what is expected."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from sys import getsizeof
from typing import NamedTuple

from router.expected_blocks import ExpectedBlocks
from router.holders import NO_SET, NOBODY, HolderSet, HolderSets, Masks, Tier

_SHARDS = 256
"""By a digest's first byte. One table of ten million blocks would take most of a second to grow,
and could not be cleaned up bit by bit."""
_ROOMY = 200
"""Bytes a block: a shard's table that is larger has shrunk and is built anew."""
_SMALL = 4096
"""Bytes that no shard's table is built anew for."""


class Hit(NamedTuple):
    """What a replica has of a chain."""

    device: int = 0
    """Leading blocks on its device, expected ones included."""
    host: int = 0
    """Blocks after those that it can read from the host memory of its node."""


NO_HIT = Hit()


class PrefixIndex:
    """Digest -> holders, exact: a block is listed while somebody holds it, and no longer.

    Memory is a function of the blocks listed, never of the traffic's history, and bounded by
    `max_blocks`, expected ones included: what would be one block too many is not taken in and
    counted in `refused`. The index then underrates what replicas hold until some of them drop
    blocks.

    A replica that leaves is forgotten at once, by changing the sets of holders; blocks that are
    left without a holder are found by nobody, and `tidy` frees them a shard at a time.
    """

    def __init__(self, max_blocks: int) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be at least 1, got {max_blocks}")
        self._max_blocks = max_blocks
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        self._sets = HolderSets()
        self._expected = ExpectedBlocks()
        self._entries = 0
        self._orphans = 0
        self._next_shard = 0
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._free_slots: list[int] = []
        self._nodes: dict[str, int] = {}
        self._nodes_version = 0
        self.refused = 0
        """Blocks not taken in because the index was full."""
        self.steps = 0
        """Digests looked up by `match` so far."""

    def __len__(self) -> int:
        """Blocks that somebody holds; those that are only expected do not count."""
        return self._entries - self._orphans

    @property
    def entries(self) -> int:
        """Blocks that take up memory: those without a holder that await `tidy` included."""
        return self._entries

    @property
    def expected(self) -> int:
        """Blocks that somebody will have."""
        return len(self._expected)

    @property
    def sets(self) -> int:
        """Different sets of holders."""
        return len(self._sets)

    def join(self, replica: str, node: str) -> None:
        """`replica` reads host memory of `node`, as do all others that joined there."""
        bit = 1 << self._slot(replica)
        self._leave_node(bit)
        self._nodes[node] = self._nodes.get(node, 0) | bit
        self._nodes_version += 1

    def store(self, replica: str, digests: Sequence[bytes], tier: Tier) -> None:
        """`replica` holds the blocks in `tier`; what is on its device is expected no more."""
        bit = 1 << self._slot(replica)
        if tier is Tier.DEVICE:
            self._expected.discard(bit, digests)
        self._change(digests, lambda masks: masks.with_bit(tier, bit))

    def remove(self, replica: str, digests: Iterable[bytes], *tiers: Tier) -> None:
        """`replica` does not hold the blocks in `tiers`; it need not have held them."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._change(digests, lambda masks: masks.without_bit(tiers, 1 << slot))

    def clear(self, replica: str, *tiers: Tier) -> None:
        """`replica` holds nothing in `tiers`."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._orphans += self._sets.strip(tiers, 1 << slot)

    def expect(self, replica: str, digests: Sequence[bytes]) -> None:
        """`replica` will have the blocks on its device, and counts as having them."""
        bit = 1 << self._slot(replica)
        room = max(0, self._max_blocks - self._entries - len(self._expected))
        self._expected.add(bit, digests[:room])
        self.refused += len(digests[room:])

    def unexpect(self, replica: str, digests: Iterable[bytes]) -> None:
        """`replica` will not have the blocks; if it has them, it keeps them."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._expected.discard(1 << slot, digests)

    def unexpect_all(self, replica: str) -> None:
        """Nothing is on its way to `replica`."""
        slot = self._slots.get(replica)
        if slot is not None:
            self._expected.clear(1 << slot)

    def drop(self, replica: str) -> None:
        """Forget a replica that has gone."""
        self.clear(replica, *Tier)
        self.unexpect_all(replica)
        slot = self._slots.pop(replica, None)
        if slot is not None:
            self._leave_node(1 << slot)
            del self._names[slot]
            heapq.heappush(self._free_slots, slot)

    def match(self, chain: Sequence[bytes]) -> dict[str, Hit]:
        """What each replica that has anything has of `chain`, found in one walk for all.

        Device hits, then host hits, never mixed, as replicas use them. A host copy of any
        replica of the node counts. A step that is like the one before costs one lookup and no
        more, or two where somebody goes on by what is expected of him.
        """
        shards, sets, expected = self._shards, self._sets.by_number, self._expected.of
        walk, previous, position, coming, hopes = _Walk(), -1, 0, 0, 0
        for position, digest in enumerate(chain):
            number = shards[digest[0]].get(digest, NO_SET)
            if number == previous and (not hopes or expected(digest, 0) == coming):
                continue
            previous, holders, coming = number, sets[number], expected(digest, 0)
            device = holders.masks.device
            if not walk.goes_on(position, device | coming, self._reach(holders)):
                break
            hopes = walk.on_device & ~device
        else:
            walk.goes_on(len(chain), 0, 0)
        self.steps += min(position + 1, len(chain))
        return {self._names[slot]: hit for slot, hit in walk.hits()}

    def tidy(self) -> None:
        """Free what one shard need not hold. Call it often: it costs little."""
        number = self._next_shard
        self._next_shard = (number + 1) % _SHARDS
        shard, sets = self._shards[number], self._sets.by_number
        if self._orphans:
            dead = [digest for digest, held in shard.items() if sets[held].masks == NOBODY]
            self._change(dead, lambda _: NOBODY)
        if getsizeof(shard) > _SMALL + _ROOMY * len(shard):
            items = list(shard.items())
            shard.clear()
            shard.update(items)

    def walk(self) -> Iterator[tuple[bytes, Masks]]:
        """Every block that takes up memory, with its holders by slot: for tests and reports."""
        for shard in self._shards:
            for digest, number in shard.items():
                yield digest, self._sets.by_number[number].masks

    def names(self, slots: int) -> set[str]:
        """The replicas that bits of a mask stand for."""
        return {name for slot, name in self._names.items() if slots >> slot & 1}

    def _change(self, digests: Iterable[bytes], change: Callable[[Masks], Masks]) -> None:
        """Move blocks from their sets of holders to others. The change of a set is worked out
        once, however many of the blocks have it, and blocks are counted by runs of one set."""
        shards, sets, moves = self._shards, self._sets, dict[int, int]()
        most = self._max_blocks - len(self._expected)
        old = new = NO_SET
        moved = 0
        for digest in digests:
            shard = shards[digest[0]]
            number = shard.get(digest, NO_SET)
            if number != old or not moved:
                self._count(old, new, moved)
                old, moved = number, 0
                if old not in moves:
                    moves[old] = sets.intern(change(sets.by_number[old].masks)).number
                new = moves[old]
            if new == old:
                continue
            if old == NO_SET and self._entries + moved >= most and not self._freed(most - moved):
                self.refused += 1
                continue
            moved += 1
            if new == NO_SET:
                del shard[digest]
            else:
                shard[digest] = new
        self._count(old, new, moved)
        for number in {*moves, *moves.values()}:
            sets.let_go(number)

    def _count(self, old: int, new: int, moved: int) -> None:
        """`moved` blocks went from one set to another."""
        if not moved:
            return
        source, target = self._sets.by_number[old], self._sets.by_number[new]
        if old == NO_SET:
            self._entries += moved
        else:
            source.blocks -= moved
            if source.masks == NOBODY:
                self._orphans -= moved
        if new == NO_SET:
            self._entries -= moved
        else:
            target.blocks += moved

    def _freed(self, most: int) -> bool:
        """Free blocks that nobody holds; whether fewer than `most` take up memory then."""
        for _ in range(_SHARDS):
            if not self._orphans or self._entries < most:
                break
            self.tidy()
        return self._entries < most

    def _reach(self, holders: HolderSet) -> int:
        if holders.reach_version != self._nodes_version:
            host = holders.masks.host
            holders.reach = sum(bits for bits in self._nodes.values() if bits & host)
            holders.reach_version = self._nodes_version
        return holders.reach

    def _slot(self, replica: str) -> int:
        slot = self._slots.get(replica)
        if slot is None:
            free = self._free_slots
            slot = self._slots[replica] = heapq.heappop(free) if free else len(self._slots)
            self._names[slot] = replica
        return slot

    def _leave_node(self, bit: int) -> None:
        left = {node: bits & ~bit for node, bits in self._nodes.items()}
        self._nodes = {node: bits for node, bits in left.items() if bits}
        self._nodes_version += 1


class _Walk:
    """Who is still with it, on a walk along a chain: everybody at first, on the device."""

    def __init__(self) -> None:
        self.on_device = -1  # all bits: nobody has dropped out yet
        self._device: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._on_host = 0

    def goes_on(self, position: int, on_device: int, reach: int) -> bool:
        """The block at `position` is on these devices and in reach of these replicas. False once
        nobody has it who had all before."""
        fallen = self.on_device & ~on_device
        if position:
            self._note(self._device, fallen, position)
            self._note(self._ends, self._on_host & ~reach, position)
        else:
            fallen = reach & ~on_device
        self.on_device &= on_device
        self._on_host = (self._on_host | fallen) & reach
        return bool(self.on_device | self._on_host)

    def hits(self) -> Iterator[tuple[int, Hit]]:
        """(slot, hit) of everybody who had anything."""
        for slot in self._device.keys() | self._ends.keys():
            device = self._device.get(slot, 0)
            yield slot, Hit(device, self._ends.get(slot, device) - device)

    @staticmethod
    def _note(positions: dict[int, int], bits: int, position: int) -> None:
        while bits:
            low = bits & -bits
            positions[low.bit_length() - 1] = position
            bits ^= low
