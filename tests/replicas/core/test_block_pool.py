from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from replicas.core.block_pool import BlockPool, OutOfBlocksError

DIGESTS = st.sampled_from([bytes([i]) * 16 for i in range(6)])


def test_block_0_is_never_handed_out() -> None:
    assert BlockPool(3).allocate(3) == [1, 2, 3]


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block, got 0"):
        BlockPool(0)


def test_asking_for_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    with pytest.raises(OutOfBlocksError, match="2 blocks asked for, 1 free"):
        pool.allocate(2)
    pool.check_integrity(held)
    assert pool.num_free == 1


def test_the_last_of_several_holders_frees() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.acquire(block)
    pool.release(block)
    assert (pool.references(block), pool.num_used) == (1, 1)
    pool.release(block)
    assert (pool.references(block), pool.num_used) == (0, 0)


def test_lowest_index_first_whatever_the_order_of_release() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    for block in (3, 1, 4):
        pool.release(block)
    assert pool.allocate(2) == [1, 3]


def test_cached_blocks_go_after_uncached_and_least_recently_released_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block in blocks[:3]:
        pool.publish(block, bytes([block]))
    for block in (2, 1, 3, 4):
        pool.release(block)
    pool.acquire(2)  # found again: it goes to the end of the line
    pool.release(2)
    assert pool.allocate(3) == [4, 1, 3]
    assert [pool.lookup(bytes([b])) for b in (1, 2, 3)] == [None, 2, None]


def test_a_cold_block_is_evicted_before_all_others() -> None:
    pool = BlockPool(3)
    for block in pool.allocate(3):
        pool.publish(block, bytes([block]))
    for block, cold in ((1, False), (2, True), (3, False)):
        pool.release(block, cold=cold)
    assert [pool.allocate(1)[0] for _ in range(3)] == [2, 1, 3]


def test_the_prized_among_those_that_go_next_are_told() -> None:
    pool = BlockPool(4)
    for block in pool.allocate(4):
        if block > 1:
            pool.publish(block, bytes([block]))
            pool.prize(block)
        pool.release(block)
    pool.unprize(3)
    two, four = (2, bytes([2])), (4, bytes([4]))
    assert [pool.prized_next(count) for count in range(5)] == [[], [], [two], [two], [two, four]]
    assert pool.prized_next(2, spared=[2, 3]) == [four]


def test_a_cached_block_comes_back_with_its_digest() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.publish(block, b"digest")
    pool.release(block)
    assert (pool.num_cached, pool.num_free) == (1, 1)
    found = pool.lookup(b"digest")
    assert found == block
    pool.acquire(block)
    assert (pool.num_cached, pool.num_free, pool.lookup(b"digest")) == (0, 0, block)


def test_the_first_block_of_a_content_stays_the_findable_one() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"digest")
    pool.publish(second, b"digest")
    assert pool.lookup(b"digest") == first
    pool.release(second)
    assert pool.num_cached == 0


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.release(2),
        lambda pool: pool.acquire(2),
        lambda pool: pool.publish(2, b"other"),
        lambda pool: pool.publish(1, b"other"),
    ],
    ids=["release free", "acquire free", "publish free", "publish twice"],
)
def test_misuse_is_refused(misuse: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    pool.publish(1, b"digest")
    with pytest.raises(ValueError, match=r"block [12]"):
        misuse(pool)
    pool.check_integrity(held)


def _lose_a_block(pool: BlockPool) -> None:
    pool._uncached.remove(4)


def _free_twice(pool: BlockPool) -> None:
    pool._uncached.append(4)


def _free_a_used_one(pool: BlockPool) -> None:
    pool._uncached.append(1)


def _free_the_reserved_one(pool: BlockPool) -> None:
    pool._uncached.append(0)


def _cache_and_free(pool: BlockPool) -> None:
    pool._uncached.append(2)


def _cache_without_digest(pool: BlockPool) -> None:
    pool._block_of.pop(b"cached")
    pool._hash_of[2] = None


def _digest_of_another(pool: BlockPool) -> None:
    pool._block_of[b"cached"] = 1


def _digest_on_a_free_one(pool: BlockPool) -> None:
    pool._hash_of[4] = b"free"
    pool._block_of[b"free"] = 4


def _count_too_high(pool: BlockPool) -> None:
    pool._references[1] += 1


@pytest.mark.parametrize(
    "corrupt",
    [
        _lose_a_block,
        _free_twice,
        _free_a_used_one,
        _free_the_reserved_one,
        _cache_and_free,
        _cache_without_digest,
        _digest_of_another,
        _digest_on_a_free_one,
        _count_too_high,
    ],
)
def test_planted_corruption_is_found(corrupt: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(4)
    used, cached = pool.allocate(2)
    pool.publish(cached, b"cached")
    pool.release(cached)
    pool.check_integrity([used])
    corrupt(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity([used])


@pytest.mark.parametrize("held", [[], [1, 1], [2], [1, 0], [1, 5], [1, -1]])
def test_holders_that_differ_from_the_counts_are_found(held: list[int]) -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check_integrity(held)


class BlockPoolMachine(RuleBasedStateMachine):
    """The pool against a model of plain lists; the model predicts every block handed out."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.held: list[int] = []
        self.uncached = list(range(1, num_blocks + 1))
        self.cached: list[int] = []
        self.digests: dict[int, bytes] = {}

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        if count > len(self.uncached) + len(self.cached):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return
        line = sorted(self.uncached) + self.cached
        expected, rest = line[:count], line[count:]
        assert self.pool.allocate(count) == expected
        self.held += expected
        self.uncached = [b for b in rest if b in self.uncached]
        self.cached = [b for b in rest if b in self.cached]
        for block in expected:
            self.digests.pop(block, None)

    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(1, self.pool.num_blocks))
        if block in self.uncached:
            with pytest.raises(ValueError, match="neither used nor cached"):
                self.pool.acquire(block)
            return
        self.pool.acquire(block)
        self.held.append(block)
        if block in self.cached:
            self.cached.remove(block)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(1, self.pool.num_blocks))
        if block not in self.held:
            with pytest.raises(ValueError, match="no holder"):
                self.pool.release(block)
            return
        self.pool.release(block)
        self.held.remove(block)
        if block not in self.held:
            (self.cached if block in self.digests else self.uncached).append(block)

    @rule(data=st.data(), digest=DIGESTS)
    def publish(self, data: st.DataObject, digest: bytes) -> None:
        block = data.draw(st.integers(1, self.pool.num_blocks))
        if block not in self.held or block in self.digests:
            with pytest.raises(ValueError, match="cannot be published"):
                self.pool.publish(block, digest)
            return
        self.pool.publish(block, digest)
        if digest not in self.digests.values():
            self.digests[block] = digest

    @rule(digest=DIGESTS)
    def lookup(self, digest: bytes) -> None:
        expected = next((b for b, h in self.digests.items() if h == digest), None)
        assert self.pool.lookup(digest) == expected

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.held)
        for block in range(1, self.pool.num_blocks + 1):
            assert self.pool.references(block) == self.held.count(block)
        assert self.pool.num_used == len(set(self.held))
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_free == len(self.uncached) + len(self.cached)
        assert self.pool.num_used + self.pool.num_free == self.pool.num_blocks


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)
