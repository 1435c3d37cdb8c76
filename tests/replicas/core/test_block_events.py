"""Events replayed over nothing give what can be found, whatever the pool and the tier did."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from replicas.core.block_events import BlockEventLog, FindableBlocks
from replicas.core.block_pool import BlockPool
from replicas.core.host_tier import HostTier
from replicas.protocol import BlockEvents

A, B = b"a" * 16, b"b" * 16
DIGESTS = [bytes([i]) * 16 for i in range(8)]
OWNER = ("choice", 0)


def test_only_the_last_event_of_a_digest_in_a_tier_counts() -> None:
    log = BlockEventLog()
    log.stored(A)
    log.removed(A)
    log.restored(A)
    log.removed(B)
    log.offloaded(A)
    log.offloaded(B)
    log.dropped(B)
    assert log.take() == BlockEvents(restored=(A,), removed=(B,), offloaded=(A,), dropped=(B,))
    assert log.take().empty


def test_what_was_before_a_clearance_is_not_told() -> None:
    log = BlockEventLog()
    log.stored(A)
    log.offloaded(A)
    log.cleared()
    log.stored(B)
    assert log.take() == BlockEvents(stored=(B,), cleared=True)
    found = FindableBlocks()
    found.apply(BlockEvents(stored=(A,), offloaded=(A, B)))
    found.apply(BlockEvents(stored=(B,), cleared=True))
    assert (found.device, found.host) == ({B}, set())


def test_a_block_that_is_there_already_is_not_stored_again() -> None:
    log = BlockEventLog()
    pool = BlockPool(2, log)
    first, second = pool.allocate(2)
    pool.publish(first, A)
    log.take()
    pool.publish(second, A)
    pool.release(second)
    assert log.take().empty
    pool.release(first)
    assert log.take().empty, "cached is findable"
    pool.allocate(2)
    assert log.take() == BlockEvents(removed=(A,))


def test_a_copied_block_is_restored_and_a_computed_one_stored() -> None:
    log = BlockEventLog()
    pool = BlockPool(2, log)
    first, second = pool.allocate(2)
    pool.publish(first, A, restored=True)
    pool.publish(second, B)
    assert log.take() == BlockEvents(stored=(B,), restored=(A,))


def test_a_block_on_its_way_to_the_host_is_told_when_it_is_there() -> None:
    log = BlockEventLog()
    tier = HostTier(1, log)
    tier.reserve(A)
    tier.pin(A, OWNER)
    assert log.take().empty
    tier.commit(A)
    assert log.take() == BlockEvents(offloaded=(A,))
    tier.start_read(A)
    tier.discard(A)
    assert log.take() == BlockEvents(dropped=(A,)), "not readable, though its slot is taken"
    tier.end_read(A)
    assert log.take().empty


def test_a_predecessors_block_is_told_and_its_eviction_too() -> None:
    log = BlockEventLog()
    tier = HostTier(1, log)
    tier.adopt(0, A)
    assert log.take() == BlockEvents(offloaded=(A,))
    tier.reserve(B)
    assert log.take() == BlockEvents(dropped=(A,))


class EventsMachine(RuleBasedStateMachine):
    """Random use of both tiers, with a look at the events every now and then."""

    @initialize(num_blocks=st.integers(1, 6), num_slots=st.integers(1, 4), adopted=st.booleans())
    def start(self, num_blocks: int, num_slots: int, adopted: bool) -> None:
        self.log = BlockEventLog()
        self.pool = BlockPool(num_blocks, self.log)
        self.tier = HostTier(num_slots, self.log)
        self.found = FindableBlocks()
        self.held: list[int] = []
        self.published: set[int] = set()
        self.writing: set[bytes] = set()
        self.reading: list[bytes] = []
        if adopted:
            self.tier.adopt(num_slots - 1, DIGESTS[0])

    @rule(count=st.integers(1, 3))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(min(count, self.pool.num_free))
        self.held += blocks
        self.published -= set(blocks)

    @precondition(lambda self: set(self.held) - self.published)
    @rule(data=st.data(), digest=st.sampled_from(DIGESTS), restored=st.booleans())
    def publish(self, data: st.DataObject, digest: bytes, restored: bool) -> None:
        block = data.draw(st.sampled_from(sorted(set(self.held) - self.published)))
        found_before = self.pool.lookup(digest)
        self.pool.publish(block, digest, restored=restored)
        if found_before is None:
            self.published.add(block)

    @rule(digest=st.sampled_from(DIGESTS))
    def hit(self, digest: bytes) -> None:
        block = self.pool.lookup(digest)
        if block is not None:
            self.pool.acquire(block)
            self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), cold=st.booleans())
    def release(self, data: st.DataObject, cold: bool) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release(block, cold=cold)

    @rule(digest=st.sampled_from(DIGESTS), prefix=st.booleans(), owned=st.booleans())
    def save(self, digest: bytes, prefix: bool, owned: bool) -> None:
        if not self.tier.holds(digest):
            if self.tier.reserve(digest) is None:
                return
            self.writing.add(digest)
        if prefix:
            self.tier.keep(digest)
        if owned:
            self.tier.pin(digest, OWNER)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), ok=st.booleans())
    def end_save(self, data: st.DataObject, ok: bool) -> None:
        digest = data.draw(st.sampled_from(sorted(self.writing)))
        self.writing.discard(digest)
        (self.tier.commit if ok else self.tier.discard)(digest)

    @rule(digest=st.sampled_from(DIGESTS))
    def start_read(self, digest: bytes) -> None:
        if self.tier.lookup(digest) is not None:
            self.tier.start_read(digest)
            self.reading.append(digest)

    @precondition(lambda self: self.reading)
    @rule(ok=st.booleans())
    def end_read(self, ok: bool) -> None:
        digest = self.reading.pop()
        self.tier.end_read(digest)
        if not ok:
            self.tier.discard(digest)

    @rule(digest=st.sampled_from(DIGESTS), ended=st.booleans())
    def let_go(self, digest: bytes, ended: bool) -> None:
        (self.tier.forget if ended else self.tier.unpin)(digest, OWNER)

    @rule()
    def look(self) -> None:
        events = self.log.take()
        for tier in (
            (*events.stored, *events.restored, *events.removed),
            (*events.offloaded, *events.dropped),
        ):
            assert all(times == 1 for times in Counter(tier).values())
        self.found.apply(events)
        assert self.found.device == {d for d in DIGESTS if self.pool.lookup(d) is not None}
        assert self.found.host == {d for d in DIGESTS if self.tier.lookup(d) is not None}
        assert self.found.device == set(self.pool.digests)
        assert self.found.host == set(self.tier.digests)

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.look()


TestEvents = EventsMachine.TestCase
TestEvents.settings = settings(max_examples=60, stateful_step_count=40)
