"""Speculative entries: until the real ones come, until their deadline, with their call."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.expectations import Expectations
from router.holders import Tier
from router.prefix_index import Hit, PrefixIndex

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


class ExpectationsMachine(RuleBasedStateMachine):
    """One call a set of blocks, as the Placer never expects a block of a replica twice."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(100)
        self.expectations = Expectations(self.index)
        self.now = 0.0
        self.model: dict[str, tuple[str, float]] = {}

    calls = st.sampled_from("pqr")
    replicas = st.sampled_from("ab")
    delays = st.floats(0.1, 10)

    @rule(call=calls, replica=replicas, delay=delays)
    def expect(self, call: str, replica: str, delay: float) -> None:
        self.expectations.expect(call, replica, [call.encode()], self.now + delay)
        self.model[call] = (replica, self.now + delay)

    @rule(call=calls)
    def cancel(self, call: str) -> None:
        self.expectations.cancel(call)
        self.model.pop(call, None)

    @rule(call=calls, replica=replicas, delay=delays)
    def move(self, call: str, replica: str, delay: float) -> None:
        self.expectations.move(call, replica, self.now + delay)
        if call in self.model and self.model[call][0] != replica:
            self.model[call] = (replica, self.now + delay)

    @rule(seconds=delays)
    def expire(self, seconds: float) -> None:
        self.now += seconds
        self.expectations.expire(self.now)
        self.model = {c: e for c, e in self.model.items() if e[1] > self.now}

    @invariant()
    def agrees(self) -> None:
        assert len(self.expectations) == len(self.model)
        for call in "pqr":
            expected = {self.model[call][0]: Hit(1, 0)} if call in self.model else {}
            assert self.index.match([call.encode()]) == expected


TestExpectations = ExpectationsMachine.TestCase
