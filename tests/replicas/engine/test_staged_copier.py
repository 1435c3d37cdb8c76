"""Copies beside the step, with a stream that does its work when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from replicas.core.block_transfer import Restore, Save
from replicas.engine.host_memory import MakeCopier
from replicas.engine.kv_pool import KVPool
from replicas.engine.staged_copier import StagedCopier
from replicas.host_store import HostStore, InProcessStore
from tests.replicas.engine.driver import ask, assert_same, make_engine, serve
from tests.replicas.engine.test_preemption import SAMPLED
from tests.replicas.engine.tiny_models import Twin, random_prompt


class FakeStream:
    """Does what is queued at once, but says so only after `polls` questions; refuses copies that
    are queued before compute was waited for."""

    def __init__(self, polls: int) -> None:
        self.polls = polls
        self.waited = False
        self.asked = 0
        self.num_pinned = 0

    def pinned(self, num_bytes: int) -> Tensor:
        self.num_pinned += 1
        return torch.empty(num_bytes, dtype=torch.uint8)

    def wait_for_compute(self) -> None:
        self.waited = True

    @contextmanager
    def queueing(self) -> Iterator[None]:
        assert self.waited
        yield

    def mark(self) -> Callable[[], bool]:
        due = self.asked + self.polls

        def is_done() -> bool:
            self.asked += 1
            return self.asked > due

        return is_done

    def sleep(self, timeout_s: float) -> None:
        self.asked += 1


def staged(stream: FakeStream, ring_blocks: int = 2) -> MakeCopier:
    def make(pool: KVPool, store: HostStore, clock: Callable[[], float]) -> StagedCopier:
        return StagedCopier(pool, store, clock, stream, ring_blocks * pool.block_bytes)

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


def test_more_copies_than_buffers_take_turns(pool: KVPool) -> None:
    store, stream = InProcessStore(6, pool.block_bytes), FakeStream(polls=1)
    copier = staged(stream)(pool, store, lambda: 0.0)
    assert stream.num_pinned == 2
    saves = [Save(block, block - 1, bytes([block]) * 16) for block in range(1, 7)]
    copier.start(saves)
    ended = []
    while len(ended) < 6:
        batch = copier.ended()
        assert len(batch) <= 2, "no more than there are buffers"
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


def test_a_block_counts_as_read_only_when_the_device_says_so(pool: KVPool) -> None:
    store, stream = InProcessStore(2, pool.block_bytes), FakeStream(polls=5)
    copier = staged(stream)(pool, store, lambda: 0.0)
    copier.start([Save(1, 0, b"x" * 16)])
    for _ in range(5):
        assert copier.ended() == []
        assert store.fetch((0, 0), b"x" * 16) is None, "sealed before it was complete"
    assert len(copier.ended()) == 1
    assert store.fetch((0, 0), b"x" * 16) is not None


def test_a_restore_that_finds_nothing_ends_badly_and_costs_no_buffer(pool: KVPool) -> None:
    stream = FakeStream(polls=0)
    copier = staged(stream)(pool, InProcessStore(2, pool.block_bytes), lambda: 0.0)
    before = contents(pool, 2)
    copier.start([Restore((0, 1), 2, b"x" * 16)] * 5)
    assert [each.ok for each in copier.ended()] == [False] * 5
    assert contents(pool, 2) == before


def test_an_engine_with_copies_beside_its_steps(llama: Twin) -> None:
    requests = [
        ask(str(i), random_prompt(12 + i, i), 24, n=1 + i % 2, **SAMPLED) for i in range(10)
    ]
    undisturbed = serve(make_engine(llama.paged), *requests)
    stream = FakeStream(polls=3)
    engine = make_engine(
        llama.paged,
        block_size=4,
        num_gpu_blocks_override=20,
        min_progress_tokens=2,
        preemption_mode="swap",
        host_blocks=400,
        make_copier=staged(stream),
    )
    assert_same(serve(engine, *requests), undisturbed)
    assert engine.stats.restored_tokens > 100
