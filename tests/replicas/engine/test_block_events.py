"""What an engine says of its blocks, step by step, is what it has."""

from __future__ import annotations

import pytest

from replicas.core.block_events import FindableBlocks
from replicas.engine.engine import Engine
from replicas.host_store import InProcessStore
from tests.replicas.engine.driver import ask, make_engine, serve
from tests.replicas.engine.slow_host import slow
from tests.replicas.engine.test_preemption import tight
from tests.replicas.engine.tiny_models import Twin, random_prompt


def run(engine: Engine) -> tuple[FindableBlocks, int]:
    """Step to the end: what the events add up to, and how many blocks they call restored."""
    found, restored = FindableBlocks(), 0
    while engine.has_work:
        engine.step()
        events = engine.take_events()
        restored += len(events.restored)
        found.apply(events)
    return found, restored


def test_events_add_up_to_what_the_engine_has(llama: Twin) -> None:
    engine = tight(llama, 20, "swap", make_copier=slow(2))
    for i in range(12):
        engine.add(ask(str(i), random_prompt(12 + i, i), 24, temperature=1.0))
    found, restored = run(engine)
    snapshot = engine.snapshot()
    assert engine.stats.swaps > 5
    assert restored > 5
    assert len(found.device) == snapshot.cached_blocks > 0
    assert len(found.host) == snapshot.host_blocks


def test_a_prefix_that_was_told_is_hit(llama: Twin) -> None:
    engine = make_engine(llama.paged)
    engine.add(ask("first", random_prompt(40), 1))
    found, _ = run(engine)
    assert len(found.device) == 5
    again = serve(engine, ask("again", random_prompt(40), 1))
    assert again["again", 0].took.cached_tokens == 32
    assert engine.take_events().empty


def test_nothing_is_told_where_nothing_can_be_shared(llama: Twin) -> None:
    engine = tight(llama, 20, "swap", enable_prefix_caching=False)
    for i in range(12):
        engine.add(ask(str(i), random_prompt(12 + i, i), 24))
    found, restored = run(engine)
    assert engine.stats.swaps > 5
    assert (found.device, found.host, restored) == (set(), set(), 0)


@pytest.mark.parametrize("caching", [True, False])
def test_what_a_predecessor_left_is_told_before_the_first_step(llama: Twin, caching: bool) -> None:
    def open_store(identity: bytes, block_bytes: int) -> InProcessStore:
        store = InProcessStore(12, block_bytes)
        store.begin(3)
        store.seal(3, b"left" * 4)
        return store

    engine = make_engine(
        llama.paged, open_store=open_store, swap_space=1.0, enable_prefix_caching=caching
    )
    assert engine.snapshot().host_blocks == 1
    assert engine.take_events().offloaded == ((b"left" * 4,) if caching else ())


def test_the_snapshot_has_what_a_router_reckons_with(llama: Twin) -> None:
    engine = make_engine(llama.paged, host_blocks=20, max_num_seqs=1, max_num_batched_tokens=16)
    for i in range(2):
        engine.add(ask(str(i), random_prompt(20, i), 4))
    snapshot = engine.snapshot()
    assert (snapshot.queued_tokens, snapshot.expected_tokens) == (40, 0)
    assert min(snapshot.prefill_tokens_per_s, snapshot.written_bytes_per_s) > 0
    engine.step()
    engine.step()
    snapshot = engine.snapshot()
    assert (snapshot.queued_tokens, snapshot.expected_tokens) == (20, 3)
    assert snapshot.pending_tokens == 21
    run(engine)
    assert engine.snapshot().decode_step_s > 0
