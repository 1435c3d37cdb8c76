"""Who gives way, what a victim keeps, and loads that once stood still or went round in circles."""

from __future__ import annotations

import pytest

from replicas.core.preemption.last_admitted import LastAdmitted
from replicas.core.preemption.policy import PreemptionPolicy
from replicas.core.request import ChoiceState
from replicas.protocol import GenerateRequest, Receipt
from tests.replicas.core.builders import BestRanked, make_request, with_prompt_logprobs
from tests.replicas.core.harness import BOTH_DEPTHS, ONE_STEP, Replica

pytestmark = BOTH_DEPTHS


def own_prompts(count: int, length: int, *, max_tokens: int) -> list[GenerateRequest]:
    """Requests r0, r1, ... whose prompts have nothing in common."""
    return [
        make_request(f"r{i}", range(i * 10_000, i * 10_000 + length), max_tokens=max_tokens)
        for i in range(count)
    ]


def run_to_preemption(replica: Replica) -> None:
    while not replica.scheduler.stats.preemptions:
        replica.step()


def receipts(replica: Replica) -> list[Receipt]:
    return [delta.receipt for delta in replica.last.values() if delta.receipt is not None]


def test_last_admitted_gives_way() -> None:
    replica = Replica(12)
    replica.submit(*own_prompts(4, 8, max_tokens=12))
    run_to_preemption(replica)
    assert [c.request.id for c in replica.scheduler.waiting] == ["r3"]
    assert [c.request.id for c in replica.scheduler.running] == ["r0", "r1", "r2"]
    replica.run()


def test_the_lowest_class_gives_way_before_the_last_arrival() -> None:
    replica = Replica(7, by_priority=True)
    low, high = own_prompts(2, 7, max_tokens=10)
    third = make_request("third", range(50, 57), max_tokens=10, priority=0)
    replica.submit(
        make_request("low", low.prompt_token_ids, max_tokens=10, priority=2),
        make_request("high", high.prompt_token_ids, max_tokens=10, priority=1),
        third,
    )
    run_to_preemption(replica)
    assert [c.request.id for c in replica.scheduler.waiting] == ["low"]
    replica.run()


def test_a_victim_keeps_its_history_and_its_place_but_no_block() -> None:
    replica = Replica(4)
    replica.submit(*own_prompts(3, 7, max_tokens=8))
    run_to_preemption(replica)
    victim = replica.choice("r1")
    assert victim.state is ChoiceState.WAITING
    assert victim.blocks == []
    assert victim.output_token_ids == replica.outputs["r1", 0] != []
    assert [c.request.id for c in replica.scheduler.waiting] == ["r1", "r2"]
    replica.run()


@ONE_STEP
def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    replica = Replica(5, caching=False)
    replica.submit(*own_prompts(2, 7, max_tokens=8))
    for _ in range(2):
        replica.step()
    replica.submit(make_request("tiny", range(50, 52), max_tokens=1))
    replica.scheduler.kv.pool.allocate(1)  # the spare block is somebody's
    output = replica.scheduler.schedule(replica.now)
    assert output.num_preempted == 1
    assert [item.key[0] for item in output.scheduled] == ["r0"]
    assert replica.scheduler.kv.pool.num_free > 0, "tiny would have fitted"


@pytest.mark.parametrize("policy", [LastAdmitted(), BestRanked()])
def test_the_leader_runs_in_every_step_whatever_the_policy(policy: PreemptionPolicy) -> None:
    replica = Replica(12, policy=policy, min_progress_tokens=2)
    replica.submit(*own_prompts(5, 9, max_tokens=20))
    while replica.scheduler.has_work:
        leaders = replica.scheduler.running[:1]
        output = replica.step()  # it checks that the leader is still there
        assert {c.key for c in leaders} <= {item.key for item in output.scheduled}
    replica.check_idle()
    assert replica.scheduler.stats.preemptions >= 3


def test_protection_saves_preemptions() -> None:
    preemptions = []
    for min_progress_tokens in (1, 12):
        replica = Replica(16, min_progress_tokens=min_progress_tokens)
        replica.submit(*own_prompts(8, 9, max_tokens=30))
        replica.run()  # each step checks who was preempted
        preemptions.append(replica.scheduler.stats.preemptions)
    assert preemptions[1] < preemptions[0]


@ONE_STEP
def test_a_protected_choice_without_room_stands_still_and_only_the_leader_preempts_it() -> None:
    replica = Replica(4)
    leader, other = own_prompts(2, 7, max_tokens=8)
    replica.submit(make_request("r0", leader.prompt_token_ids[:5], max_tokens=8), other)
    replica.step()
    protected = replica.choice("r1")
    protected.preemptions = 1  # as if it had been resumed
    running = [{item.key[0] for item in replica.step().scheduled} for _ in range(3)]
    assert running == [{"r0", "r1"}, {"r0"}, {"r0"}]
    assert protected in replica.scheduler.running
    assert replica.scheduler.stats.preemptions == 0
    assert replica.step().num_preempted == 1
    assert protected in replica.scheduler.waiting


def test_who_is_better_ranked_does_not_give_way_to_who_is_not_the_leader() -> None:
    """r2 finds no room, and only itself to preempt."""
    replica = Replica(6, policy=BestRanked())
    first, second, third = own_prompts(3, 7, max_tokens=8)
    replica.submit(
        make_request("r0", first.prompt_token_ids[:5], max_tokens=8),
        make_request("r1", second.prompt_token_ids[:5], max_tokens=8),
        third,
    )
    run_to_preemption(replica)
    assert [c.request.id for c in replica.scheduler.waiting] == ["r2"]
    replica.run()


@pytest.mark.parametrize("caching", [True, False])
@ONE_STEP
def test_prompt_logprobs_are_complete_after_preemption_in_mid_prefill(caching: bool) -> None:
    """O05. The client's copy is compared with an undisturbed run on delivery."""
    replica = Replica(5, budget=3, caching=caching)
    replica.submit(
        make_request("r0", range(2), max_tokens=12),
        with_prompt_logprobs(make_request("r1", range(50, 66), max_tokens=1)),
    )
    run_to_preemption(replica)
    known = len(replica.choice("r1").prompt_logprobs)
    assert 4 < known < 15
    replica.run()
    positions = [
        item.prompt_logprobs
        for step in replica.steps
        for item in step.scheduled
        if item.prompt_logprobs is not None
    ]
    assert [stop for _, stop in positions[:-1]] == [start for start, _ in positions[1:]]
    assert (positions[0][0], positions[-1][1]) == (0, 15)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 64])
def test_prompt_logprobs_of_a_cached_prompt_are_complete(length: int) -> None:
    """O06"""
    replica = Replica(16, 16)
    for name in ("first", "second", "third"):
        data = make_request(name, range(length), max_tokens=1)
        replica.submit(with_prompt_logprobs(data))
        replica.run()
        assert replica.steps[-1].scheduled[0].start == 0
        replica.submit(make_request(f"{name} prefix", range(min(length, 16)), max_tokens=1))
        replica.run()


@pytest.mark.parametrize("warm", [0, 200])
def test_long_prompts_do_not_wait_for_each_other(warm: int) -> None:
    """O02: no two choices each hold a part of the pool and wait for the rest of it. Each step
    checks that whoever is admitted has all the room that it will prefill."""
    replica = Replica(40, 16, budget=64)
    prompts = [range(i * 1000, i * 1000 + 500) for i in range(2)]
    if warm:
        replica.submit(*(make_request(f"w{i}", prompts[i][:warm], max_tokens=1) for i in range(2)))
        replica.run()
    replica.submit(*(make_request(f"r{i}", prompts[i], max_tokens=8) for i in range(2)))
    replica.run(100)


def test_a_long_prompt_is_not_preempted_over_and_over() -> None:
    """O04: a resumed choice comes in only when all that it knows has room."""
    replica = Replica(64, 16, max_num_seqs=16)
    replica.submit(
        *own_prompts(6, 60, max_tokens=150),
        make_request("long", range(90_000, 90_700), max_tokens=150),
    )
    replica.run(2000)
    stats = replica.scheduler.stats
    assert stats.preemptions > 0
    assert all(receipt.preemptions < 10 for receipt in receipts(replica))
    assert stats.computed_tokens < 1.2 * (6 * 210 + 850)


def test_mixed_traffic_leaves_nothing_behind() -> None:
    """O07: same, new and half-shared prompts, some aborted, some with three choices."""
    replica = Replica(20, max_num_seqs=4, budget=16)
    pool = replica.scheduler.kv.pool
    for count in range(60):
        prompts = (range(10), range(100 * count, 100 * count + 14), [*range(8), count, count])
        for kind, prompt in enumerate(prompts):
            replica.submit(make_request(f"{count}.{kind}", prompt, n=1 + 2 * (kind == 1)))
        replica.step()
        if count % 3 == 0:
            replica.abort(f"{count}.{count // 3 % 3}")
        if count % 10 == 9:
            replica.run()
            assert pool.num_used == 0
            assert pool.num_free == pool.num_blocks
    replica.submit(make_request("largest", range(7000, 7079), max_tokens=1))
    replica.run()
    assert len(replica.steps[-1].scheduled[0].blocks) == pool.num_blocks


def test_refused_and_cancelled_hits_keep_no_reference() -> None:
    """O18: what a waiting choice matched is not held, what a running one uses is not evicted."""
    prefix = range(160)
    replica = Replica(30, 16)
    replica.submit(make_request("stream", prefix, max_tokens=60))
    replica.step()
    for count in range(20):
        name = f"r{count}"
        tail = range(1000 * (count + 1), 1000 * (count + 1) + 310)
        replica.submit(make_request(name, [*prefix, *tail], max_tokens=1))
        replica.step()
        assert replica.choice(name).state is ChoiceState.WAITING
        replica.abort(name)
    replica.submit(make_request("filler", range(50_000, 50_250), max_tokens=1))
    replica.run()
    assert replica.scheduler.stats.preemptions == 0
    replica.submit(make_request("full", range(90_000, 90_479), max_tokens=1))
    replica.run()


@pytest.mark.parametrize("num_blocks", [20, 500])
def test_hits_count_what_a_first_admission_found(num_blocks: int) -> None:
    """O28: random prompts have no hits, however often they come back and find themselves."""
    replica = Replica(num_blocks, budget=8)
    replica.submit(*own_prompts(30, 12, max_tokens=12))
    replica.run()
    stats = replica.scheduler.stats
    assert (stats.preemptions > 0) == (num_blocks == 20)
    assert (stats.recomputed_tokens > 0) == (num_blocks == 20)
    assert stats.prefix_cache_hits == 0
    assert stats.prefix_cache_queries == stats.prompt_tokens == 30 * 12
    assert all(receipt.cached_tokens == 0 for receipt in receipts(replica))
    useful = 30 * (12 + 12 - 1)
    assert stats.computed_tokens == useful + stats.recomputed_tokens
    assert sum(receipt.recomputed_tokens for receipt in receipts(replica)) == (
        stats.recomputed_tokens
    )


def test_only_what_looks_for_a_prefix_counts_as_a_query() -> None:
    for caching in (True, False):
        replica = Replica(16, caching=caching)
        for name in ("first", "second"):
            replica.submit(make_request(name, range(9), max_tokens=1))
            replica.run()
        replica.submit(with_prompt_logprobs(make_request("logprobs", range(9), n=2)))
        replica.run()
        stats = replica.scheduler.stats
        expected = (18, 8) if caching else (0, 0)
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == expected


@ONE_STEP
def test_a_receipt_tells_of_hits_preemptions_and_stalls() -> None:
    replica = Replica(5)
    replica.submit(make_request("warm", range(9), max_tokens=1))
    replica.run()
    replica.submit(make_request("r0", range(50, 57), max_tokens=8))
    replica.submit(make_request("r1", range(9), max_tokens=6))
    run_to_preemption(replica)
    preempted_at = replica.now
    while replica.choice("r1").state is ChoiceState.WAITING:
        replica.step()
    resumed_at = replica.now
    replica.run()
    receipt = replica.last["r1", 0].receipt
    assert receipt is not None
    assert receipt.cached_tokens == 8
    assert receipt.preemptions == 1
    assert receipt.stall_s == resumed_at - preempted_at
    assert receipt.queue_s == 1.0
    stats = replica.scheduler.stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (9 + 7 + 9, 8)


@ONE_STEP
def test_known_tokens_are_not_sampled_again() -> None:
    replica = Replica(9)
    replica.submit(*own_prompts(4, 7, max_tokens=14))
    replica.run()
    assert replica.scheduler.stats.preemptions > 2
    for name, outputs in replica.outputs.items():
        drawn = [
            draw.output_index
            for step in replica.steps
            for item in step.scheduled
            for draw in item.draws
            if draw.key == name
        ]
        assert drawn == list(range(len(outputs)))
