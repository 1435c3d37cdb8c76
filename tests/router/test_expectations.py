"""Speculative entries: until the real ones come, until their deadline, with their call."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from replicas.protocol import BlockEvents
from router.expectations import Expectations
from router.holders import Tier
from router.prefix_index import Hit, PrefixIndex
from router.replica_states import ReplicaStates
from tests.router.feeds import Feed

CHAIN = [bytes([i]) for i in range(4)]


def test_counts_as_held_until_the_deadline() -> None:
    index = PrefixIndex(100)
    expectations = Expectations(index)
    expectations.expect("call", "a", CHAIN, deadline=5.0)
    assert index.match(CHAIN) == {"a": Hit(4, 0)}
    expectations.expire(4.9)
    assert index.match(CHAIN) == {"a": Hit(4, 0)}
    expectations.expire(5.0)
    assert (len(index), len(expectations)) == (0, 0)


def test_the_real_block_outlives_the_deadline() -> None:
    index = PrefixIndex(100)
    expectations = Expectations(index)
    expectations.expect("call", "a", CHAIN, deadline=5.0)
    index.store("a", CHAIN[:3], Tier.DEVICE)
    expectations.expire(5.0)
    assert index.match(CHAIN) == {"a": Hit(3, 0)}


def test_a_block_computed_and_lost_again_is_expected_no_more() -> None:
    index = PrefixIndex(100)
    Expectations(index).expect("call", "a", CHAIN, deadline=5.0)
    index.store("a", CHAIN, Tier.DEVICE)
    index.remove("a", CHAIN[2:], Tier.DEVICE)
    assert index.match(CHAIN) == {"a": Hit(2, 0)}


def test_an_old_deadline_does_not_end_a_new_expectation() -> None:
    index = PrefixIndex(100)
    expectations = Expectations(index)
    expectations.expect("call", "a", CHAIN, deadline=5.0)
    expectations.expect("call", "a", CHAIN, deadline=9.0)
    expectations.expire(6.0)
    assert index.match(CHAIN) == {"a": Hit(4, 0)}


def test_a_call_that_ends_early_leaves_what_others_bring() -> None:
    index = PrefixIndex(100)
    expectations = Expectations(index)
    short, other = CHAIN[:2], [*CHAIN[:1], b"x"]
    expectations.expect("first", "a", CHAIN, deadline=5.0)
    expectations.expect("short", "a", short, deadline=6.0, known=2)
    expectations.expect("other", "a", other, deadline=7.0, known=1)
    expectations.expect("elsewhere", "b", CHAIN, deadline=9.0)
    expectations.cancel("first")
    assert index.match(CHAIN)["a"] == Hit(2, 0), "as far as the short one goes"
    assert index.match(other)["a"] == Hit(2, 0)
    expectations.cancel("short")
    assert index.match(CHAIN)["a"] == Hit(1, 0)
    expectations.expire(7.0)
    assert index.match(CHAIN) == {"b": Hit(4, 0)}
    expectations.cancel("elsewhere")
    assert (index.expected, len(expectations), len(expectations._anchored)) == (0, 0, 0)


def chain_of(prompt: str) -> list[bytes]:
    return [prompt[: i + 1].encode() for i in range(len(prompt))]


def test_what_a_replica_says_that_it_evicted_is_expected_no_more() -> None:
    feed = Feed(ReplicaStates(PrefixIndex(100)), "a").connect()
    index = feed.states.index
    feed.step(0.0, BlockEvents(stored=tuple(CHAIN[:2])))
    index.expect("a", CHAIN)
    feed.step(0.0, BlockEvents(removed=tuple(CHAIN[1:2])))
    assert index.match(CHAIN) == {"a": Hit(1, 0)}


def test_nothing_is_expected_of_a_replica_that_has_gone() -> None:
    """Of one with a host tier some memory stays, and its place in the index with it."""
    feed = Feed(ReplicaStates(PrefixIndex(100)), "a").connect()
    feed.states.index.expect("a", CHAIN)
    feed.states.forget("a")
    assert (feed.states.index.match(CHAIN), feed.states.index.expected) == ({}, 0)


class ExpectationsMachine(RuleBasedStateMachine):
    """Prompts of one tree, so that calls share blocks: a replica is expected to have what the
    prompt of any call there has."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(100)
        self.expectations = Expectations(self.index)
        self.now = 0.0
        self.model: dict[str, tuple[str, str, float]] = {}

    calls = st.sampled_from("pqrs")
    replicas = st.sampled_from("ab")
    prompts = st.text("xy", min_size=1, max_size=4)
    delays = st.floats(0.1, 10)

    @rule(call=calls, replica=replicas, prompt=prompts, delay=delays)
    def expect(self, call: str, replica: str, prompt: str, delay: float) -> None:
        self.cancel(call)
        chain, deadline = chain_of(prompt), self.now + delay
        known = self.index.match(chain).get(replica, Hit()).device
        self.expectations.expect(call, replica, chain, deadline, known)
        self.model[call] = (replica, prompt, deadline)

    @rule(call=calls)
    def cancel(self, call: str) -> None:
        self.expectations.cancel(call)
        self.model.pop(call, None)

    @rule(call=calls, replica=replicas, delay=delays)
    def move(self, call: str, replica: str, delay: float) -> None:
        self.expectations.move(call, replica, self.now + delay)
        if call in self.model and self.model[call][0] != replica:
            self.model[call] = (replica, self.model[call][1], self.now + delay)

    @rule(seconds=delays)
    def expire(self, seconds: float) -> None:
        self.now += seconds
        self.expectations.expire(self.now)
        self.model = {c: e for c, e in self.model.items() if e[2] > self.now}

    @invariant()
    def agrees(self) -> None:
        assert len(self.expectations) == len(self.model)
        coming = {
            (replica, digest)
            for replica, prompt, _ in self.model.values()
            for digest in chain_of(prompt)
        }
        for digest in {digest for _, digest in coming}:
            expected = {replica: Hit(1, 0) for replica in "ab" if (replica, digest) in coming}
            assert self.index.match([digest]) == expected
        assert self.index.expected == len({digest for _, digest in coming})


TestExpectations = ExpectationsMachine.TestCase
TestExpectations.settings = settings(max_examples=60)
