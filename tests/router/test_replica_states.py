"""What is known of replicas whose feeds break, lag, lose steps, and begin anew."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replicas.protocol import BlockEvents, FeedSnapshot, FeedStep
from router.prefix_index import Hit, PrefixIndex
from router.replica_states import ORPHAN_S, STALE_AFTER_S, ReplicaStates
from tests.router.feeds import ENGINE, LOAD, Feed

NODES = {"a": "n0", "b": "n0", "c": "n1"}
BLOCKS = [bytes([i]) for i in range(6)]


def states() -> ReplicaStates:
    return ReplicaStates(PrefixIndex(1000))


def device(it: ReplicaStates, replica: str) -> set[bytes]:
    """Blocks that the index has on the replica's device."""
    return {block for block in BLOCKS if it.index.match([block]).get(replica, Hit()).device}


@st.composite
def events(draw: st.DrawFn) -> BlockEvents:
    """No digest twice in one tier, as the protocol has it."""
    device_blocks = draw(st.permutations(BLOCKS))
    cuts = sorted(draw(st.lists(st.integers(0, 6), min_size=3, max_size=3)))
    host_blocks = draw(st.permutations(BLOCKS))
    host_cuts = sorted(draw(st.lists(st.integers(0, 6), min_size=2, max_size=2)))
    return BlockEvents(
        stored=tuple(device_blocks[: cuts[0]]),
        restored=tuple(device_blocks[cuts[0] : cuts[1]]),
        removed=tuple(device_blocks[cuts[1] : cuts[2]]),
        offloaded=tuple(host_blocks[: host_cuts[0]]),
        dropped=tuple(host_blocks[host_cuts[0] : host_cuts[1]]),
        cleared=draw(st.booleans()),
    )


class FeedsMachine(RuleBasedStateMachine):
    """Three replicas; their steps travel over connections that lose some of them or break."""

    def __init__(self) -> None:
        super().__init__()
        self.states = states()
        self.now = 0.0
        self.incarnations = 0
        self.feeds: dict[str, Feed] = {}
        self.current: set[str] = set()
        """Whose every step since a snapshot has been delivered."""
        self.orphans: dict[str, tuple[str, set[bytes], float]] = {}
        self.heard: dict[str, float] = {}

    replicas = st.sampled_from(sorted(NODES))

    @rule(replica=replicas)
    def start(self, replica: str) -> None:
        """A replica, or its successor under the same name; a router that joins late comes to
        see it in mid-stream."""
        self.incarnations += 1
        incarnation = str(self.incarnations)
        feed = Feed(self.states, replica, NODES[replica], incarnation, sequence=5)
        self.feeds[replica] = feed
        feed.happen(BlockEvents(stored=(BLOCKS[0],), offloaded=(BLOCKS[1],)))
        feed.connect(self.now)
        self.current.add(replica)
        self.heard[replica] = self.now
        self.orphans = {r: o for r, o in self.orphans.items() if o[0] != NODES[replica]}

    @precondition(lambda self: self.feeds)
    @rule(data=st.data(), what=events())
    def deliver(self, data: st.DataObject, what: BlockEvents) -> None:
        feed = self._any(data)
        known = feed.replica in self.current
        assert feed.step(self.now, what) == known
        if known:
            self.heard[feed.replica] = self.now

    @precondition(lambda self: self.feeds)
    @rule(data=st.data(), what=events())
    def lose_a_step(self, data: st.DataObject, what: BlockEvents) -> None:
        feed = self._any(data)
        feed.happen(what)
        if feed.replica in self.current:
            assert not feed.step(self.now), "a gap"
            self.current.discard(feed.replica)

    @precondition(lambda self: self.feeds)
    @rule(data=st.data())
    def repeat_a_step(self, data: st.DataObject) -> None:
        feed = self._any(data)
        step = FeedStep(feed.sequence, BlockEvents(cleared=True), LOAD)
        assert self.states.apply(feed.replica, step, self.now) == (feed.replica in self.current)

    @precondition(lambda self: self.feeds)
    @rule(data=st.data())
    def break_connection(self, data: st.DataObject) -> None:
        replica = self._any(data).replica
        self.states.lose(replica, self.now)
        self.current.discard(replica)

    @precondition(lambda self: self.feeds)
    @rule(data=st.data())
    def reconnect(self, data: st.DataObject) -> None:
        feed = self._any(data)
        feed.connect(self.now)
        self.current.add(feed.replica)
        self.heard[feed.replica] = self.now

    @rule(replica=replicas)
    def forget(self, replica: str) -> None:
        self.states.forget(replica)
        feed = self.feeds.pop(replica, None)
        self.current.discard(replica)
        if feed is not None:
            until = self.heard[replica] + ORPHAN_S
            self.orphans[replica] = (feed.node, set(), until)

    @rule(seconds=st.floats(0, 1) | st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.states.expire(self.now)
        self.orphans = {r: o for r, o in self.orphans.items() if o[2] > self.now}

    @invariant()
    def current_ones_are_known_exactly(self) -> None:
        for replica in self.current:
            feed, state = self.feeds[replica], self.states.get(replica)
            assert state is not None
            assert (state.sequence, state.load) == (feed.sequence, feed.load)
            assert device(self.states, replica) == feed.device
            assert state.is_fresh(self.now) == (self.now - self.heard[replica] <= STALE_AFTER_S)

    @invariant()
    def others_are_stale_and_those_gone_have_no_device(self) -> None:
        for replica in NODES:
            state = self.states.get(replica)
            if replica not in self.feeds:
                assert state is None
                assert device(self.states, replica) == set()
            elif replica not in self.current:
                assert state is not None
                assert not state.is_fresh(self.now)

    @invariant()
    def nothing_is_left_when_all_have_gone(self) -> None:
        if not self.feeds and not self.orphans:
            assert len(self.states.index) == 0

    def _any(self, data: st.DataObject) -> Feed:
        return self.feeds[data.draw(st.sampled_from(sorted(self.feeds)))]


TestFeeds = FeedsMachine.TestCase
TestFeeds.settings = settings(max_examples=80, stateful_step_count=40)


def host(it: ReplicaStates, replica: str, chain: Iterable[bytes] = BLOCKS) -> int:
    return it.index.match(list(chain)).get(replica, Hit()).host


def test_a_dead_replicas_host_memory_serves_its_node_until_the_keeper_frees_it() -> None:
    it = states()
    Feed(it, "a", "n0", host=set(BLOCKS)).connect(0.0)
    Feed(it, "b", "n0").connect(0.0)
    Feed(it, "c", "n1").connect(0.0)
    it.forget("a")
    assert (host(it, "b"), host(it, "c")) == (6, 0)
    it.expire(ORPHAN_S - 0.1)
    assert host(it, "b") == 6
    it.expire(ORPHAN_S)
    assert (host(it, "b"), len(it.index)) == (0, 0)


def test_a_death_may_be_told_more_than_once() -> None:
    """Serve tells it for each call that failed there, and once more when the replica is off its
    list."""
    it = states()
    feed = Feed(it, "a", "n0", device=set(BLOCKS[:1]), host=set(BLOCKS)).connect(0.0)
    Feed(it, "b", "n0").connect(0.0)
    for _ in range(3):
        it.forget("a")
        assert (host(it, "b"), device(it, "a")) == (6, set())
    it.expire(ORPHAN_S)
    assert (host(it, "b"), len(it.index)) == (0, 0)
    feed.connect(ORPHAN_S)
    it.forget("a")
    assert host(it, "b") == 6, "a life of its own"


def test_what_nobody_holds_any_more_is_freed_as_steps_come_in() -> None:
    it = states()
    Feed(it, "a", engine=replace(ENGINE, host_blocks=0), device=set(BLOCKS)).connect(0.0)
    other = Feed(it, "b").connect(0.0)
    it.forget("a")
    assert it.index.entries == len(BLOCKS)
    for second in range(256):
        other.step(float(second))
    assert it.index.entries == 0


def test_a_successor_says_itself_what_it_took_over() -> None:
    it = states()
    Feed(it, "a", "n0", host=set(BLOCKS)).connect(0.0)
    Feed(it, "b", "n0").connect(0.0)
    it.forget("a")
    Feed(it, "a2", "n0", host=set(BLOCKS[:2])).connect(1.0)
    assert host(it, "b") == 2


def test_a_reconnecting_neighbour_takes_over_nothing() -> None:
    it = states()
    Feed(it, "a", "n0", host=set(BLOCKS)).connect(0.0)
    neighbour = Feed(it, "b", "n0").connect(0.0)
    it.forget("a")
    neighbour.connect(1.0)
    assert host(it, "b") == 6


def test_without_a_host_tier_nothing_outlives_a_replica() -> None:
    it = states()
    Feed(it, "a", engine=replace(ENGINE, host_blocks=0), device=set(BLOCKS)).connect(0.0)
    it.forget("a")
    assert len(it.index) == 0


def test_words_from_one_that_was_forgotten_are_ignored() -> None:
    it = states()
    feed = Feed(it, "a", device=set(BLOCKS)).connect()
    it.forget("a")
    it.lose("a", 1.0)
    it.reset("a", FeedSnapshot(9, tuple(BLOCKS), (), LOAD), 1.0)
    assert not feed.step(1.0)
    assert (len(it), len(it.index)) == (0, 0)


def test_what_a_report_contains_is_known_from_the_one_before_it() -> None:
    """A snapshot's load may be from before its connection, and a word that repeats the load from
    within a long step: neither proves that the replica took anything in."""
    it = states()
    feed = Feed(it, "a").connect(1.0)
    state = it.get("a")
    assert state is not None
    feed.step(2.0, running=1)
    assert state.previous_at < 0
    feed.step(3.0, running=2)
    assert state.previous_at == 2.0
    feed.step(4.0)
    feed.step(5.0)
    assert (state.previous_at, state.received_at) == (2.0, 5.0)
    feed.step(6.0, running=1)
    assert state.previous_at == 3.0
    feed.connect(7.0)
    feed.step(8.0, running=3)
    assert state.previous_at < 0


def test_preemptions_are_a_rate_that_fades() -> None:
    it = states()
    feed = Feed(it, "a").connect(0.0)
    for second in range(1, 301):
        feed.step(float(second), preemptions=2 * second)
    state = it.get("a")
    assert state is not None
    assert state.preemptions_per_s == pytest.approx(2, rel=0.05)
    for second in range(301, 601):
        feed.step(float(second))
    assert state.preemptions_per_s < 0.05


def test_gaps_are_counted() -> None:
    it = states()
    feed = Feed(it, "a").connect()
    feed.happen()
    assert not feed.step(1.0)
    assert it.gaps == 1
