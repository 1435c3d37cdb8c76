"""Copies beside the step, with a queues that does its work when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kernels.block_moves import TorchBlockMoves
from replicas.core.block_transfer import Restore, Save
from replicas.engine.host_memory import MakeCopier
from replicas.engine.kv_pool import KVPool
from replicas.engine.staged_copier import StagedCopier
from replicas.host_store import HostStore, InProcessStore
from tests.replicas.engine.driver import ask, assert_same, make_engine, serve
from tests.replicas.engine.test_preemption import SAMPLED
from tests.replicas.engine.tiny_models import Twin, random_prompt


class FakeMark:
    def __init__(self, queues: FakeQueues, queue: str) -> None:
        self._queues = queues
        self.queue = queue
        self._due = queues.asked + queues.polls

    def is_done(self) -> bool:
        self._queues.asked += 1
        return self._queues.asked > self._due


class FakeQueue:
    def __init__(self, queues: FakeQueues, name: str) -> None:
        self._queues = queues
        self._name = name

    @contextmanager
    def queueing(self) -> Iterator[None]:
        assert self._queues.waited
        self._queues.log.append(self._name)
        yield

    def mark(self) -> FakeMark:
        self._queues.marks.append(FakeMark(self._queues, self._name))
        return self._queues.marks[-1]

    def wait_for(self, mark: FakeMark) -> None:
        self._queues.log.append(f"{self._name} waits for {self._queues.marks.index(mark)}")


class FakeQueues:
    """Does what is queued at once, but says so only after `polls` questions; refuses work that is
    queued before compute was waited for."""

    def __init__(self, polls: int) -> None:
        self.polls = polls
        self.waited = False
        self.asked = 0
        self.marks: list[FakeMark] = []
        self.log: list[str] = []
        self.kernels = FakeQueue(self, "kernels")
        self.bus = FakeQueue(self, "bus")

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def wait_for_compute(self) -> None:
        self.waited = True

    def sleep(self, timeout_s: float) -> None:
        self.asked += 1


CHUNKS = 4
"""Of the ring."""


def staged(queues: FakeQueues, chunk_blocks: int = 1) -> MakeCopier:
    def make(pool: KVPool, store: HostStore, clock: Callable[[], float]) -> StagedCopier:
        chunk_bytes = chunk_blocks * pool.block_bytes
        return StagedCopier(pool, store, clock, queues, TorchBlockMoves(), chunk_bytes)

    return make


@pytest.fixture
def pool(llama: Twin) -> KVPool:
    pool = KVPool(llama.paged.spec, num_blocks=6, block_size=8, dtype=torch.float32, device="cpu")
    for layer in range(llama.paged.spec.num_layers):
        for part in pool.layer(layer):
            part[1:] = torch.randn(part[1:].shape)
    return pool


def contents(pool: KVPool, block: int) -> bytes:
    out = torch.empty(pool.block_bytes, dtype=torch.uint8)
    pool.export(block, out)
    return out.numpy().tobytes()


@pytest.mark.parametrize("chunk_blocks", [1, 2, 4])
def test_more_copies_than_the_ring_holds_take_turns(pool: KVPool, chunk_blocks: int) -> None:
    store, queues = InProcessStore(6, pool.block_bytes), FakeQueues(polls=1)
    copier = staged(queues, chunk_blocks)(pool, store, lambda: 0.0)
    saves = [Save(block, block - 1, bytes([block]) * 16) for block in range(1, 7)]
    copier.start(saves)
    ended = []
    while len(ended) < 6:
        batch = copier.ended()
        assert len(batch) <= CHUNKS * chunk_blocks, "no more than there is pinned memory for"
        ended += batch
    assert [each.copy for each in ended] == saves
    before = [contents(pool, save.block) for save in saves]
    # Each block gets another one's content back.
    restores = [Restore((0, s.slot), 7 - s.block, s.digest) for s in saves]
    copier.start(restores)
    for _ in range(20):
        ended += copier.ended()
    assert [each.copy for each in ended[6:]] == restores
    assert all(each.ok for each in ended)
    assert [contents(pool, 7 - save.block) for save in saves] == before


def test_a_chunk_goes_one_way_and_is_one_copy(pool: KVPool) -> None:
    """Copies of a chunk end together, and each counts as its share of the time."""
    store, queues, now = InProcessStore(6, pool.block_bytes), FakeQueues(polls=1), [0.0]
    copier = staged(queues, chunk_blocks=3)(pool, store, lambda: now[0])
    saves = [Save(block, block - 1, bytes([block]) * 16) for block in range(1, 6)]
    copier.start(saves)
    now[0] = 6.0
    assert copier.ended() == []
    assert len(queues.marks) == 2 * 2
    ended = copier.ended()
    assert [each.copy for each in ended] == saves
    # What the second chunk waited for the first one is left out.
    assert [each.seconds for each in ended] == [2.0] * 3 + [0.0] * 2
    copier.start([Restore((0, 0), 6, saves[0].digest), Save(1, 5, b"x" * 16)])
    assert len(queues.marks) == 4 * 2


def test_kernels_fill_one_staging_buffer_while_the_bus_has_the_other(pool: KVPool) -> None:
    store, queues = InProcessStore(6, pool.block_bytes), FakeQueues(polls=0)
    copier = staged(queues)(pool, store, lambda: 0.0)
    saves = [Save(block, block - 1, bytes([block]) * 16) for block in (1, 2, 3)]
    copier.start([*saves, Restore((0, 5), 4, b"gone" * 4)])
    # Marks 0, 2, 4 end the gathers, 1, 3, 5 the copies: the third gather waits for the first copy.
    copies = ["kernels", "bus waits for 0", "bus", "kernels", "bus waits for 2", "bus"]
    assert queues.log == [*copies, "kernels waits for 1", "kernels", "bus waits for 4", "bus"]
    copier.ended()
    queues.log.clear()
    copier.start([Restore((0, save.slot), save.block, save.digest) for save in saves])
    expected = []
    for user, copied in ((3, 6), (5, 8), (7, 10)):
        expected += [f"bus waits for {user}", "bus", f"kernels waits for {copied}", "kernels"]
    assert queues.log == expected


def test_a_restore_that_is_gone_leaves_no_gap_in_its_chunk(pool: KVPool) -> None:
    store, queues = InProcessStore(6, pool.block_bytes), FakeQueues(polls=0)
    copier = staged(queues, chunk_blocks=4)(pool, store, lambda: 0.0)
    saves = [Save(block, block - 1, bytes([block]) * 16) for block in (1, 2)]
    copier.start(saves)
    assert len(copier.ended()) == 2
    before = [contents(pool, 1), contents(pool, 2), contents(pool, 5)]
    restores = [
        Restore((0, 0), 3, saves[0].digest),
        Restore((0, 4), 5, b"gone" * 4),
        Restore((0, 1), 4, saves[1].digest),
    ]
    copier.start(restores)
    ended = {each.copy: each.ok for each in copier.ended()}
    assert ended == {restores[0]: True, restores[1]: False, restores[2]: True}
    assert [contents(pool, 3), contents(pool, 4), contents(pool, 5)] == before


def test_a_block_counts_as_read_only_when_the_device_says_so(pool: KVPool) -> None:
    store, queues = InProcessStore(2, pool.block_bytes), FakeQueues(polls=5)
    copier = staged(queues)(pool, store, lambda: 0.0)
    copier.start([Save(1, 0, b"x" * 16)])
    for _ in range(5):
        assert copier.ended() == []
        assert store.fetch((0, 0), b"x" * 16) is None, "sealed before it was complete"
    assert len(copier.ended()) == 1
    assert store.fetch((0, 0), b"x" * 16) is not None


def test_a_restore_that_finds_nothing_ends_badly_and_costs_no_buffer(pool: KVPool) -> None:
    queues = FakeQueues(polls=0)
    copier = staged(queues)(pool, InProcessStore(2, pool.block_bytes), lambda: 0.0)
    before = contents(pool, 2)
    copier.start([Restore((0, 1), 2, b"x" * 16)] * 5)
    assert [each.ok for each in copier.ended()] == [False] * 5
    assert contents(pool, 2) == before


def test_an_engine_with_copies_beside_its_steps(llama: Twin) -> None:
    requests = [
        ask(str(i), random_prompt(12 + i, i), 24, n=1 + i % 2, **SAMPLED) for i in range(10)
    ]
    undisturbed = serve(make_engine(llama.paged), *requests)
    queues = FakeQueues(polls=3)
    engine = make_engine(
        llama.paged,
        block_size=4,
        num_gpu_blocks_override=20,
        min_progress_tokens=2,
        preemption_mode="swap",
        host_blocks=400,
        make_copier=staged(queues),
    )
    assert_same(serve(engine, *requests), undisturbed)
    assert engine.stats.restored_tokens > 100
