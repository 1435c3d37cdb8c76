"""The prefix index against a dict of sets, at its limit, and over a long history."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.holders import Tier
from router.prefix_index import Hit, PrefixIndex

REPLICAS = ["a0", "a1", "b0", "b1"]
"""Named after their nodes."""
BLOCKS = [bytes([i % 3, i]) for i in range(8)]
"""In three shards, of which one is often larger than the others."""

Holding = tuple[str, Tier | None]
"""Replica and tier; None: it is only expected on the device."""


class IndexMachine(RuleBasedStateMachine):
    """Holders as plain sets."""

    limit = 1000

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(self.limit)
        self.model: defaultdict[bytes, set[Holding]] = defaultdict(set)
        self.nodes: dict[str, str] = {}

    replicas = st.sampled_from(REPLICAS)
    tiers = st.sampled_from(Tier)
    blocks = st.lists(st.sampled_from(BLOCKS), max_size=5)

    @rule(replica=replicas)
    def join(self, replica: str) -> None:
        self.index.join(replica, replica[0])
        self.nodes[replica] = replica[0]

    @rule(replica=replicas, digests=blocks, tier=tiers)
    def store(self, replica: str, digests: list[bytes], tier: Tier) -> None:
        self.index.store(replica, digests, tier)
        for digest in digests:
            held = self.model[digest]
            held.add((replica, tier))
            if tier is Tier.DEVICE:
                held.discard((replica, None))

    @rule(replica=replicas, digests=blocks)
    def expect(self, replica: str, digests: list[bytes]) -> None:
        self.index.expect(replica, digests)
        for digest in digests:
            self.model[digest].add((replica, None))

    @rule(replica=replicas, digests=blocks)
    def unexpect(self, replica: str, digests: list[bytes]) -> None:
        self.index.unexpect(replica, digests)
        for digest in digests:
            self.model[digest].discard((replica, None))

    @rule(replica=replicas)
    def unexpect_all(self, replica: str) -> None:
        self.index.unexpect_all(replica)
        for held in self.model.values():
            held.discard((replica, None))

    @rule(replica=replicas, digests=blocks, tiers=st.sets(tiers))
    def remove(self, replica: str, digests: list[bytes], tiers: set[Tier]) -> None:
        self.index.remove(replica, digests, *tiers)
        for digest in digests:
            self.model[digest] -= {(replica, tier) for tier in tiers}

    @rule(replica=replicas, tiers=st.sets(tiers))
    def clear(self, replica: str, tiers: set[Tier]) -> None:
        self.index.clear(replica, *tiers)
        for held in self.model.values():
            held -= {(replica, tier) for tier in tiers}

    @rule(replica=replicas)
    def drop(self, replica: str) -> None:
        self.index.drop(replica)
        self.nodes.pop(replica, None)
        for held in self.model.values():
            held -= {(replica, tier) for tier in (*Tier, None)}

    @rule(times=st.integers(1, 300))
    def tidy(self, times: int) -> None:
        for _ in range(times):
            self.index.tidy()

    @rule(chain=st.lists(st.sampled_from([*BLOCKS, b"unknown"]), max_size=8))
    def match(self, chain: list[bytes]) -> None:
        expected = {replica: self._hit(replica, chain) for replica in REPLICAS}
        assert self.index.match(chain) == {r: hit for r, hit in expected.items() if any(hit)}

    def _hit(self, replica: str, chain: Sequence[bytes]) -> Hit:
        on_device = {(replica, Tier.DEVICE), (replica, None)}
        position = 0
        while position < len(chain) and self.model[chain[position]] & on_device:
            position += 1
        device, node = position, self.nodes.get(replica)
        while position < len(chain) and any(
            tier is Tier.HOST and node is not None and self.nodes.get(holder) == node
            for holder, tier in self.model[chain[position]]
        ):
            position += 1
        return Hit(device, position - device)

    @invariant()
    def lists_what_is_held(self) -> None:
        expected = [holders for holders in self.model.values() if None in {t for _, t in holders}]
        assert self.index.expected == len(expected)
        held = {
            digest: real
            for digest, holders in self.model.items()
            if (real := {each for each in holders if each[1] is not None})
        }
        assert len(self.index) == len(held)
        walked = {
            digest: {
                (name, tier)
                for tier, slots in zip(Tier, masks, strict=True)
                for name in self.index.names(slots)
            }
            for digest, masks in self.index.walk()
        }
        assert {digest: holders for digest, holders in walked.items() if holders} == held
        assert self.index.entries == len(walked)
        assert self.index.refused == 0
        assert self.index.sets <= len(walked)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=80, stateful_step_count=40)


class FullIndexMachine(RuleBasedStateMachine):
    """At its limit an index lists fewer blocks than are held, never others, and says so."""

    limit = 4

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(self.limit)
        self.held: set[tuple[str, bytes]] = set()
        self.stored = 0

    replicas = st.sampled_from(REPLICAS)
    blocks = st.lists(st.sampled_from(BLOCKS), max_size=6, unique=True)

    @rule(replica=replicas, digests=blocks)
    def store(self, replica: str, digests: list[bytes]) -> None:
        self.index.store(replica, digests, Tier.DEVICE)
        self.held |= {(replica, digest) for digest in digests}
        self.stored += len(digests)

    @rule(replica=replicas, digests=blocks)
    def expect(self, replica: str, digests: list[bytes]) -> None:
        self.index.expect(replica, digests)
        self.held |= {(replica, digest) for digest in digests}
        self.stored += len(digests)

    @rule(replica=replicas, digests=blocks)
    def remove(self, replica: str, digests: list[bytes]) -> None:
        self.index.remove(replica, digests, Tier.DEVICE)
        self.index.unexpect(replica, digests)
        self.held -= {(replica, digest) for digest in digests}

    @rule(replica=replicas)
    def drop(self, replica: str) -> None:
        self.index.drop(replica)
        self.held = {(holder, digest) for holder, digest in self.held if holder != replica}

    @invariant()
    def never_invents(self) -> None:
        for digest in BLOCKS:
            for replica in self.index.match([digest]):
                assert (replica, digest) in self.held

    @invariant()
    def is_bounded(self) -> None:
        assert self.index.entries + self.index.expected <= self.limit
        assert self.index.refused <= self.stored

    @precondition(lambda self: self.index.refused == 0)
    @invariant()
    def is_complete_unless_it_says_so(self) -> None:
        for replica, digest in self.held:
            assert replica in self.index.match([digest])


TestFullIndex = FullIndexMachine.TestCase


def digests(count: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(count)]


def test_refuses_what_is_too_much_and_counts_it() -> None:
    index, blocks = PrefixIndex(10), digests(15)
    index.store("a", blocks, Tier.DEVICE)
    assert (len(index), index.refused) == (10, 5)
    assert index.match(blocks) == {"a": Hit(10, 0)}
    index.store("b", blocks[:10], Tier.DEVICE)
    assert index.refused == 5, "another holder of a listed block takes no room"
    index.remove("a", blocks[:10], Tier.DEVICE)
    index.remove("b", blocks[:3], Tier.DEVICE)
    index.store("a", blocks[10:], Tier.DEVICE)
    assert (len(index), index.refused) == (10, 7)


def test_room_of_a_replica_that_has_gone_is_used_again_at_once() -> None:
    index = PrefixIndex(1000)
    index.store("a", digests(1000, seed=1), Tier.DEVICE)
    index.drop("a")
    assert len(index) == 0
    index.store("b", digests(1000, seed=2), Tier.DEVICE)
    assert (len(index), index.refused) == (1000, 0)


def test_the_walk_ends_with_the_last_hit() -> None:
    index, blocks = PrefixIndex(10_000), digests(2000)
    for number, replica in enumerate(["a", "b", "c"]):
        index.store(replica, blocks[: 10 * (number + 1)], Tier.DEVICE)
    assert index.match(blocks) == {"a": Hit(10, 0), "b": Hit(20, 0), "c": Hit(30, 0)}
    assert index.steps == 31


def test_a_replica_reads_the_host_memory_of_its_neighbour_only() -> None:
    index, blocks = PrefixIndex(100), digests(6)
    for replica in ("a0", "a1", "b0"):
        index.join(replica, replica[0])
    index.store("a0", blocks[:2], Tier.DEVICE)
    index.store("a1", blocks[1:5], Tier.HOST)
    assert index.match(blocks) == {"a0": Hit(2, 3)}
    index.store("b0", blocks[:1], Tier.HOST)
    assert index.match(blocks) == {"a0": Hit(2, 3), "b0": Hit(0, 1)}
    index.join("b0", "a")
    assert index.match(blocks) == {"a0": Hit(2, 3), "a1": Hit(0, 5), "b0": Hit(0, 5)}


def test_dropping_a_replica_touches_sets_and_no_blocks() -> None:
    index = PrefixIndex(200_000)
    index.store("a", digests(100_000), Tier.DEVICE)
    index.store("b", digests(50_000), Tier.DEVICE)
    index.drop("a")
    assert (len(index), index.entries) == (50_000, 100_000)
    for _ in range(256):
        index.tidy()
    assert index.entries == 50_000
    index.drop("b")
    assert (len(index), index.match(digests(3))) == (0, {})


def test_memory_is_given_back() -> None:
    def table_bytes() -> int:
        return sum(shard.__sizeof__() for shard in index._shards)

    index, blocks = PrefixIndex(500_000), digests(300_000)
    empty = table_bytes()
    index.store("a", blocks, Tier.DEVICE)
    full = table_bytes()
    index.remove("a", blocks, Tier.DEVICE)
    assert (len(index), index.sets) == (0, 0)
    for _ in range(256):
        index.tidy()
    assert table_bytes() < empty + 0.05 * full


def test_ever_new_prompts_leave_nothing_behind() -> None:
    """O20: a tree of prefixes kept the inner nodes of all prompts ever seen."""
    rng, limit = random.Random(0), 5000
    index, head = PrefixIndex(limit), digests(2)
    caches = {replica: deque[bytes]() for replica in "abc"}
    sizes, walked, steps = [], [], []
    for number in range(200_000):
        replica = "abc"[number % 3]
        cache = caches[replica]
        chain = [*head, rng.randbytes(16), rng.randbytes(16)]
        before = index.steps
        assert len(index.match(chain)) <= 3
        steps.append(index.steps - before)
        index.store(replica, chain, Tier.DEVICE)
        cache.extend(chain[2:])
        evicted = [cache.popleft() for _ in range(len(cache) - limit // 3 + 2)]
        index.remove(replica, evicted, Tier.DEVICE)
        if number % 20_000 == 19_999:
            sizes.append(len(index))
            walked.append(sum(1 for _ in index.walk()))
    assert len(set(sizes)) == 1
    assert sizes == walked
    assert sizes[0] <= limit
    assert index.refused == 0
    assert index.sets < 10
    assert max(steps) == 3, "two blocks of the head, and the first that nobody has"
    for replica in caches:
        index.drop(replica)
    for _ in range(256):
        index.tidy()
    assert (len(index), index.entries, index.sets) == (0, 0, 0)
    assert list(index.walk()) == []


def test_refuses_a_limit_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PrefixIndex(0)
