"""The books of the host tier: slots, pins, who is evicted, and a machine that mixes it all."""

from __future__ import annotations

from time import process_time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replicas.core.host_tier import HostTier

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
ONE, TWO = ("one", 0), ("two", 0)


def write(tier: HostTier, digest: bytes) -> int:
    slot = tier.reserve(digest)
    assert slot is not None
    tier.commit(digest)
    return slot


def test_a_block_is_readable_only_once_it_has_been_written() -> None:
    tier = HostTier(2)
    slot = tier.reserve(A)
    assert tier.holds(A)
    assert tier.lookup(A) is None
    tier.pin(A, ONE)
    tier.commit(A)
    assert tier.lookup(A) == slot


def test_what_nobody_owns_and_no_prefix_is_dropped_when_written() -> None:
    tier = HostTier(2)
    write(tier, A)
    assert not tier.holds(A)
    assert tier.num_free == 2


def test_an_entry_lives_as_long_as_its_last_owner() -> None:
    tier = HostTier(2)
    tier.reserve(A)
    tier.pin(A, ONE)
    tier.pin(A, TWO)
    tier.commit(A)
    tier.forget(A, ONE)
    assert tier.num_pinned == 1
    tier.forget(A, TWO)
    assert tier.num_used == 0


def test_the_least_recently_used_prefix_goes_first_and_a_pinned_one_never() -> None:
    tier = HostTier(2)
    for digest in (A, B):
        tier.reserve(digest)
        tier.keep(digest)
        tier.commit(digest)
    tier.touch([A])
    assert tier.reserve(C) is not None
    assert (tier.holds(A), tier.holds(B)) == (True, False)
    tier.pin(A, ONE)
    assert tier.reserve(B) is None, "one slot is pinned, one is being written"
    tier.unpin(A, ONE)
    assert tier.reserve(B) is not None


def test_an_entry_that_is_read_is_neither_evicted_nor_forgotten() -> None:
    tier = HostTier(1)
    tier.reserve(A)
    tier.pin(A, ONE)
    tier.commit(A)
    tier.start_read(A)
    tier.forget(A, ONE)
    assert tier.reserve(B) is None
    tier.end_read(A)
    assert tier.num_used == 0


def test_a_discarded_entry_is_found_no_more_and_its_slot_is_free_after_the_last_reader() -> None:
    tier = HostTier(1)
    tier.reserve(A)
    tier.pin(A, ONE)
    tier.commit(A)
    tier.start_read(A)
    tier.discard(A)
    assert tier.lookup(A) is None
    assert tier.num_free == 0
    tier.end_read(A)
    assert tier.num_free == 1
    tier.forget(A, ONE)
    tier.discard(A)


def test_an_adopted_block_is_a_prefix() -> None:
    tier = HostTier(3)
    tier.adopt(1, A)
    assert tier.lookup(A) == 1
    assert tier.num_free == 3
    tier.check_integrity()


def test_of_a_block_that_a_slab_holds_twice_one_is_adopted() -> None:
    tier = HostTier(3)
    for slot in (0, 2):
        tier.adopt(slot, A)
    assert (tier.num_used, tier.num_free) == (1, 3)
    tier.check_integrity()
    assert {write(tier, B), write(tier, C)} <= {0, 1, 2} - {tier.lookup(A)}


def test_adopting_a_large_slab_takes_no_time() -> None:
    """Searching the list of free slots for each of them took seven seconds."""
    tier, before = HostTier(40_000), process_time()
    for slot in range(40_000):
        tier.adopt(slot, slot.to_bytes(16, "big"))
    assert process_time() - before < 2.0
    tier.check_integrity()


def test_what_is_wanted_stays_longest_and_of_a_chain_the_head() -> None:
    tier, chain = HostTier(6), [bytes([i]) * 16 for i in range(6)]
    for digest in chain:
        tier.reserve(digest)
        tier.keep(digest)
        tier.commit(digest)
    tier.touch([*chain[:3], b"is not there"])
    for digest in reversed(chain[:3]):  # how copies end does not matter
        tier.start_read(digest)
        tier.end_read(digest)
    gone = []
    for number in range(6):
        assert tier.reserve(bytes([100 + number]) * 16) is not None
        gone += [digest for digest in chain if not tier.holds(digest) and digest not in gone]
    assert gone == [*chain[3:], *reversed(chain[:3])]


def test_a_block_that_is_wanted_over_and_over_is_queued_but_once_or_twice() -> None:
    tier = HostTier(3)
    for digest in (A, B):
        tier.reserve(digest)
        tier.keep(digest)
        tier.commit(digest)
    for _ in range(100):
        tier.touch([A])
    assert len(tier._queue) <= 6
    tier.check_integrity()


def test_writing_a_block_twice_is_a_mistake() -> None:
    tier = HostTier(2)
    tier.reserve(A)
    with pytest.raises(ValueError, match="already"):
        tier.reserve(A)


class HostTierMachine(RuleBasedStateMachine):
    """Random use, as the offloader makes it; a model says what must still be there."""

    @initialize(num_slots=st.integers(1, 6))
    def start(self, num_slots: int) -> None:
        self.tier = HostTier(num_slots)
        self.writing: set[bytes] = set()
        self.reading: list[bytes] = []
        self.pinned: set[tuple[bytes, int]] = set()

    @rule(which=st.integers(0, 9), owner=st.integers(0, 2), prefix=st.booleans())
    def save(self, which: int, owner: int, prefix: bool) -> None:
        digest = bytes([which]) * 16
        if not self.tier.holds(digest):
            slot = self.tier.reserve(digest)
            if slot is None:
                busy = self.writing | set(self.reading) | {d for d, _ in self.pinned}
                assert len(busy) >= self.tier.num_slots, "refused though a slot was to be had"
                return
            self.writing.add(digest)
        if prefix:
            self.tier.keep(digest)
        else:
            self.tier.pin(digest, (str(owner), 0))
            self.pinned.add((digest, owner))

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), ok=st.booleans())
    def end_save(self, data: st.DataObject, ok: bool) -> None:
        digest = data.draw(st.sampled_from(sorted(self.writing)))
        self.writing.discard(digest)
        if ok:
            self.tier.commit(digest)
        else:
            self._discard(digest)

    @rule(which=st.integers(0, 9))
    def start_read(self, which: int) -> None:
        digest = bytes([which]) * 16
        if self.tier.lookup(digest) is not None:
            self.tier.start_read(digest)
            self.reading.append(digest)

    @precondition(lambda self: self.reading)
    @rule(ok=st.booleans())
    def end_read(self, ok: bool) -> None:
        digest = self.reading.pop()
        self.tier.end_read(digest)
        if not ok:
            self._discard(digest)

    @rule(chain=st.lists(st.integers(0, 9), unique=True))
    def touch(self, chain: list[int]) -> None:
        self.tier.touch([bytes([which]) * 16 for which in chain])

    @rule(owner=st.integers(0, 2), which=st.integers(0, 9))
    def unpin(self, owner: int, which: int) -> None:
        digest = bytes([which]) * 16
        self.tier.unpin(digest, (str(owner), 0))
        self.pinned.discard((digest, owner))

    @rule(owner=st.integers(0, 2))
    def end_owner(self, owner: int) -> None:
        for which in range(10):
            self.tier.forget(bytes([which]) * 16, (str(owner), 0))
        self.pinned = {(digest, o) for digest, o in self.pinned if o != owner}

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "tier"):
            return
        owners = [(str(owner), 0) for owner in range(3)]
        self.tier.check_integrity(owners, owners)
        assert self.tier.num_used <= self.tier.num_slots
        for digest in {d for d, _ in self.pinned}:
            assert self.tier.holds(digest), "a pinned block is gone"
        slots = [slot for d in range(10) if (slot := self.tier.lookup(bytes([d]) * 16)) is not None]
        assert len(set(slots)) == len(slots)

    def _discard(self, digest: bytes) -> None:
        self.tier.discard(digest)
        self.pinned = {(d, owner) for d, owner in self.pinned if d != digest}
        if digest in self.reading:  # its last reader drops it; until then the slot is taken
            while digest in self.reading:
                self.reading.remove(digest)
                self.tier.end_read(digest)


TestHostTierMachine = HostTierMachine.TestCase
TestHostTierMachine.settings = settings(max_examples=60, stateful_step_count=40)
