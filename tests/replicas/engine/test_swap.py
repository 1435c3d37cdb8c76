"""KV that was kept on the host: a swapped run equals the undisturbed one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels.fp8 import FP8
from replicas.core.block_transfer import Location
from replicas.engine.host_copier import DirectCopier
from replicas.engine.host_memory import MakeCopier
from replicas.engine.kv_pool import KVPool
from replicas.host_store import InProcessStore
from replicas.models.kv_scales import KVScales
from tests.replicas.engine.driver import (
    BOTH_DEPTHS,
    ONE_STEP,
    Client,
    ask,
    assert_same,
    make_engine,
    serve,
    tokens,
)
from tests.replicas.engine.slow_host import ForgetfulStore, cheap, slow, throttled
from tests.replicas.engine.test_preemption import BLOCK, SAMPLED, tight
from tests.replicas.engine.tiny_models import Twin, random_prompt

pytestmark = BOTH_DEPTHS


@pytest.mark.parametrize("copier", [slow(1), slow(4)])
@pytest.mark.parametrize("caching", [True, False])
def test_slow_copies_spoil_nothing(llama: Twin, copier: MakeCopier, caching: bool) -> None:
    requests = [ask(str(i), random_prompt(5 + i, i), 24, n=1 + i % 3, **SAMPLED) for i in range(12)]
    undisturbed = serve(make_engine(llama.paged), *requests)
    engine = tight(llama, 20, "swap", make_copier=copier, enable_prefix_caching=caching)
    answers = serve(engine, *requests)
    assert_same(answers, undisturbed)
    assert engine.stats.restored_tokens > 0
    assert engine.stats.preemptions >= 10


def test_blocks_that_are_lost_are_computed_again(llama: Twin) -> None:
    requests = [ask(str(i), random_prompt(12 + i, i), 24, **SAMPLED) for i in range(12)]
    undisturbed = serve(make_engine(llama.paged), *requests)
    stores: list[ForgetfulStore] = []

    def open_store(identity: bytes, block_bytes: int) -> ForgetfulStore:
        stores.append(ForgetfulStore(400, block_bytes, period=3))
        return stores[-1]

    engine = tight(llama, 20, "swap", host_blocks=0, open_store=open_store, swap_space=1.0)
    assert_same(serve(engine, *requests), undisturbed)
    assert stores[0].fetched > 20
    assert engine.stats.failed_copies > 5
    assert engine.stats.recomputed_tokens > 0


@pytest.mark.parametrize("host_blocks", [1, 5])
def test_a_full_tier_falls_back_to_computing(llama: Twin, host_blocks: int) -> None:
    requests = [ask(str(i), random_prompt(12 + i, i), 24, **SAMPLED) for i in range(12)]
    undisturbed = serve(make_engine(llama.paged), *requests)
    client = Client(tight(llama, 20, "swap", host_blocks=host_blocks))
    client.send(*requests)
    while client.engine.has_work:
        client.step()
        assert client.engine.snapshot().host_blocks <= host_blocks
    assert_same(client.run(), undisturbed)
    assert client.engine.stats.recomputed_tokens > 0


def test_a_late_restore_is_given_up(llama: Twin) -> None:
    requests = [ask(str(i), random_prompt(12 + i, i), 24) for i in range(6)]
    undisturbed = serve(make_engine(llama.paged), *requests)
    engine = tight(llama, 20, "swap", make_copier=slow(30), restore_patience_s=1e-6)
    assert_same(serve(engine, *requests), undisturbed)
    assert engine.stats.swaps > 0
    assert engine.stats.restored_tokens == 0
    assert engine.stats.failed_copies > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@ONE_STEP
def test_a_block_comes_back_as_it_was(llama: Twin, dtype: torch.dtype) -> None:
    spec = llama.paged.spec
    ones = torch.ones(spec.num_layers, spec.kv_heads)
    scales = KVScales(ones, ones) if dtype == FP8 else None
    pool = KVPool(spec, num_blocks=3, block_size=8, dtype=dtype, device="cpu", scales=scales)
    store = InProcessStore(2, pool.block_bytes)
    for layer in range(llama.paged.spec.num_layers):
        for part in pool.layer(layer):
            part[2] = torch.randn(part[2].shape).to(dtype)
    before = [part[2].clone() for i in range(2) for part in pool.layer(i)]
    pool.export(2, store.begin(1))
    store.seal(1, b"d" * 16)
    for layer in range(llama.paged.spec.num_layers):
        for part in pool.layer(layer):
            part[1:] = float("nan")
    content = store.fetch((0, 1), b"d" * 16)
    assert content is not None
    pool.load(2, content)
    after = [part[2] for i in range(2) for part in pool.layer(i)]
    for was, is_ in zip(before, after, strict=True):
        assert torch.equal(was.float(), is_.float())
    assert pool.layer(0)[0][1].float().isnan().all(), "nothing else was touched"


def test_abort_in_every_state_leaves_nothing_behind(llama: Twin) -> None:
    """O30: preempted to the host, then resumed, cancelled, or finished, over and over."""
    engine = tight(llama, 14, "swap", make_copier=slow(2), spill_prefix_tokens=None, host_blocks=60)
    client = Client(engine)
    swaps = [0]
    for count in range(60):
        twin = random_prompt(16, count)
        client.send(
            ask(f"a{count}", twin, 12, n=2, **SAMPLED), ask(f"b{count}", random_prompt(14), 12)
        )
        client.step(2 + count % 17)
        if count % 3:
            client.abort(f"a{count}", None if count % 2 else 1)
        if count % 4 == 0:
            client.send(ask(f"c{count}", twin, 2))
        if count % 5 == 4:
            client.run()
            snapshot = engine.snapshot()
            assert snapshot.pinned_host_blocks == snapshot.copies == snapshot.used_blocks == 0
            assert snapshot.host_blocks <= 60
            swaps.append(engine.stats.swaps)
    assert engine.stats.swaps > 30
    assert all(later - before > 3 for before, later in pairwise(swaps)), "they go on to work"


def test_without_prefixes_worth_keeping_the_tier_is_empty_in_the_end(llama: Twin) -> None:
    engine = tight(llama, 16, "swap", spill_prefix_tokens=None)
    requests = [ask(str(i), random_prompt(10, i), 24, n=4, **SAMPLED) for i in range(4)]
    serve(engine, *requests)
    assert engine.stats.swaps > 10
    assert engine.stats.written_bytes > 0
    assert engine.stats.read_bytes > 0
    assert engine.snapshot().host_blocks == 0


def test_long_prompts_come_back_together(llama: Twin) -> None:
    """O02 (c): both are swapped out and neither waits for the other for ever."""
    requests = [ask(str(i), random_prompt(250, i), 60) for i in range(3)]
    undisturbed = serve(make_engine(llama.paged, max_num_batched_tokens=64), *requests)
    engine = tight(llama, 140, "swap", max_num_batched_tokens=32)
    assert_same(serve(engine, *requests), undisturbed)
    assert engine.stats.swaps > 0


def test_prefixes_larger_than_the_pool_are_still_hits(llama: Twin) -> None:
    """Three prefixes take turns in a pool for one and a half of them."""
    engine = make_engine(
        llama.paged,
        num_gpu_blocks_override=30,
        host_blocks=100,
        spill_prefix_tokens=100,
        make_copier=cheap,
    )
    requests = [ask(str(i), random_prompt(160, i), 4, logprobs=1) for i in range(3)]
    first = [serve(engine, request) for request in requests]
    for request, before in zip(requests, first, strict=True):
        again = serve(engine, request)
        assert_same(again, before)
        took = again[request.request_id, 0].took
        assert took.cached_tokens + took.host_cached_tokens == 152
        assert took.host_cached_tokens > 0
    assert engine.stats.spilled_blocks >= 40
    assert engine.stats.host_cache_hits > 300


def test_a_prefix_that_was_hit_is_kept_however_short_it_is(llama: Twin) -> None:
    engine = make_engine(
        llama.paged,
        num_gpu_blocks_override=12,
        host_blocks=100,
        spill_prefix_tokens=None,
        make_copier=cheap,
    )
    popular, once = random_prompt(24, 1), random_prompt(24, 2)
    for name, prompt in (("first", popular), ("second", popular), ("once", once)):
        serve(engine, ask(name, (*prompt, 7), 1))
    serve(engine, ask("large", random_prompt(90, 3), 1))
    for prompt, hits in ((popular, 24), (once, 0)):
        took = serve(engine, ask("again", (*prompt, 7), 1))["again", 0].took
        assert (took.cached_tokens, took.host_cached_tokens) == (0, hits)


class _Orphaned(InProcessStore):
    """Own memory, and that of a replica that has died."""

    def __init__(self, num_slots: int, dead: InProcessStore) -> None:
        super().__init__(num_slots, dead.block_bytes)
        self._dead = dead
        self._slots = {digest: slot for slot, digest in dead.inventory()}

    def find(self, digest: bytes) -> Location | None:
        slot = self._slots.get(digest)
        return None if slot is None else (1, slot)

    def fetch(self, source: Location, digest: bytes) -> torch.Tensor | None:
        if source[0] == 1:
            return self._dead.fetch((0, source[1]), digest)
        return super().fetch(source, digest)


def test_another_replica_restores_what_one_that_died_had_written(llama: Twin) -> None:
    stores: list[InProcessStore] = []

    def remember(identity: bytes, block_bytes: int) -> InProcessStore:
        stores.append(InProcessStore(200, block_bytes))
        return stores[-1]

    dying = Client(tight(llama, 20, "swap", host_blocks=0, open_store=remember, swap_space=1.0))
    requests = [ask(str(i), random_prompt(30, i), 24) for i in range(3)]
    dying.send(*requests)
    while not dying.engine.stats.swaps:
        dying.step()
    moved = next(r for r in requests if not dying.answers[r.request_id, 0].finish_reason)
    engine = make_engine(
        llama.paged,
        block_size=BLOCK,
        open_store=lambda _, __: _Orphaned(50, stores[0]),
        make_copier=cheap,
        swap_space=1.0,
    )
    hits = [serve(engine, request)[request.request_id, 0].took for request in requests]
    assert max(took.host_cached_tokens for took in hits) >= 28
    assert tokens(serve(make_engine(llama.paged), moved)) == tokens(serve(engine, moved))


@pytest.mark.parametrize(("gib_per_s", "swaps"), [(1e-6, False), (10.0, True)])
@ONE_STEP
def test_auto_takes_what_is_cheaper(llama: Twin, gib_per_s: float, swaps: bool) -> None:
    requests = [ask(str(i), random_prompt(30 + i, i), 80) for i in range(16)]
    engine = make_engine(
        llama.paged,
        num_gpu_blocks_override=60,
        host_blocks=400,
        preemption_mode="auto",
        make_copier=throttled(gib_per_s * 2**30),
    )
    serve(engine, *requests)
    stats = engine.stats
    assert stats.preemptions >= 10
    share = stats.swaps / stats.preemptions
    assert share >= 0.9 if swaps else share <= 0.1


def test_a_preemption_tells_what_it_cost(llama: Twin) -> None:
    engine = tight(llama, 20, "swap")
    for i in range(24):
        engine.add(ask(str(i), random_prompt(20, i), 24))
    costs = []
    while engine.has_work:
        costs += engine.step().resumed
    assert len(costs) >= 0.5 * engine.stats.preemptions > 5
    assert all(cost.swapped and cost.predicted_s > 0 for cost in costs)
    assert all(0 < cost.actual_s < 10 for cost in costs)


@ONE_STEP
def test_the_probe_leaves_no_trace(llama: Twin) -> None:
    engine = make_engine(llama.paged, host_blocks=10)
    assert engine.info.host_blocks == 10
    assert engine.snapshot().host_blocks == engine.snapshot().used_blocks == 0
    guess = 2e9
    assert engine.costs.write.per_second != guess
    assert engine.costs.read.per_second != guess


@ONE_STEP
def test_open_store_that_has_nothing_to_give(llama: Twin) -> None:
    engine = make_engine(llama.paged, open_store=lambda _, __: None, swap_space=1.0)
    assert engine.info.host_blocks == 0
    assert engine.snapshot().host_blocks == 0


@ONE_STEP
def test_what_a_copier_carries_out_has_ended(llama: Twin) -> None:
    pool = KVPool(llama.paged.spec, num_blocks=2, block_size=8, dtype=torch.float32, device="cpu")
    copier = DirectCopier(pool, InProcessStore(1, pool.block_bytes), clock=lambda: 0.0)
    assert copier.ended() == []
