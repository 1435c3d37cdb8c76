"""A step is scheduled while the one before is in flight: one token of a choice is not known yet."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from replicas.core import replica_snapshot
from replicas.core.request import ChoiceState
from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler_output import PENDING, SchedulerOutput
from replicas.protocol import FinishReason, GenerateRequest
from tests.replicas.core.builders import make_request
from tests.replicas.core.fake_device import reference
from tests.replicas.core.harness import Replica

PENALISED = SamplingParams(max_tokens=6, seed=17, ignore_eos=True, presence_penalty=0.5)


def keys(output: SchedulerOutput) -> list[str]:
    return [item.key[0] for item in output.scheduled]


def stopping(request_id: str, length: int) -> GenerateRequest:
    """It ends by itself, with its output token number `length`."""
    for seed in count():
        sampling = SamplingParams(max_tokens=1000, seed=seed)
        data = make_request(request_id, range(5), sampling=sampling)
        if len(reference(data, 0, 1000)[0]) == length:
            return data
    raise AssertionError


def test_the_next_step_takes_the_token_that_is_being_drawn() -> None:
    replica = Replica(16, depth=2)
    replica.submit(make_request("a", range(5), max_tokens=4))
    replica.fill()
    first, second = replica.in_flight
    assert (first.scheduled[0].start, len(first.scheduled[0].token_ids)) == (0, 5)
    (item,) = second.scheduled
    assert (item.start, tuple(item.token_ids), item.decodes) == (5, (PENDING,), True)
    assert [draw.output_index for draw in item.draws] == [1]
    choice = replica.choice("a")
    assert (choice.num_known_tokens, choice.num_computed_tokens) == (5, 0)
    assert (choice.in_flight_tokens, choice.in_flight_draws) == (6, 2)
    replica.run()


def test_a_block_is_reserved_for_a_token_not_known_yet() -> None:
    replica = Replica(16, depth=2)
    replica.submit(make_request("a", range(8), max_tokens=4))
    replica.fill()
    first, second = replica.in_flight
    assert [len(output.scheduled[0].blocks) for output in (first, second)] == [2, 3]
    replica.run()


def test_chunks_of_a_prompt_follow_each_other() -> None:
    replica = Replica(16, budget=4, depth=2)
    replica.submit(make_request("a", range(10), max_tokens=2))
    replica.fill()
    chunks = [output.scheduled[0] for output in replica.in_flight]
    assert [(c.start, len(c.token_ids), len(c.draws)) for c in chunks] == [(0, 4, 0), (4, 4, 0)]
    assert replica_snapshot.take(replica.scheduler).pending_tokens == 10, "none is computed yet"
    replica.run()


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_an_end_that_is_foreseen_costs_no_step(max_tokens: int) -> None:
    replica = Replica(16, depth=2)
    replica.submit(make_request("a", range(5), max_tokens=max_tokens))
    replica.run()
    assert len(replica.steps) == max_tokens


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(3, 1000), (16, 12)])
def test_neither_pool_nor_context_is_outgrown(num_blocks: int, max_model_len: int) -> None:
    replica = Replica(num_blocks, max_model_len=max_model_len, depth=2)
    replica.submit(make_request("a", range(5), max_tokens=100))
    replica.run()
    assert replica.last["a", 0].finish_reason is FinishReason.LENGTH
    assert len(replica.outputs["a", 0]) == replica.limit - 5 == len(replica.steps)


def test_a_surplus_draw_leaves_no_trace() -> None:
    """The stop token would have filled the second block; the step behind it still writes there."""
    replica = Replica(16, depth=2)
    replica.submit(stopping("a", 3), make_request("b", range(50, 55), max_tokens=8))
    while ("a", 0) not in replica.last:
        replica.step()
    (surplus,) = replica.in_flight
    assert keys(surplus) == ["a", "b"]
    assert len(replica.outputs["a", 0]) == 3
    assert replica.scheduler.kv.pool.num_used == len(replica.choice("b").blocks)
    assert replica.scheduler.kv.pool.num_cached == 1, "5 + 2 tokens were computed for its client"
    generated = replica.scheduler.stats.generation_tokens
    computed = replica.scheduler.stats.computed_tokens
    replica.take()
    assert replica.scheduler.stats.generation_tokens == generated + 1
    assert replica.scheduler.stats.computed_tokens == computed + 1
    replica.run()


def test_blocks_of_a_surplus_draw_are_handed_out_once_it_is_launched() -> None:
    replica = Replica(4, depth=2)
    replica.submit(stopping("a", 6), make_request("waits", range(50, 64), max_tokens=2))
    while ("a", 0) not in replica.last:
        replica.step()
    (surplus,) = replica.in_flight
    used = set(surplus.scheduled[0].blocks)
    replica.fill()
    taken = replica.in_flight[1].scheduled[0]
    assert taken.key == ("waits", 0)
    assert used & set(taken.blocks)
    replica.run()


def test_a_draw_that_needs_the_last_token_waits_for_it() -> None:
    replica = Replica(16, depth=2)
    plain = [make_request(name, range(50, 55), max_tokens=6) for name in "ab"]
    replica.submit(*plain, make_request("p", range(5), sampling=PENALISED))
    replica.fill()
    assert [keys(output) for output in replica.in_flight] == [["a", "b", "p"], ["a", "b"]]
    replica.run()  # the device checks that each draw got its whole history


def test_a_batch_of_such_draws_is_not_split() -> None:
    """Each step computes all of it: there is no running ahead."""
    replica = Replica(32, depth=2)
    replica.submit(*(make_request(name, range(5), sampling=PENALISED) for name in "abcd"))
    replica.fill()
    late = replace(PENALISED, max_tokens=5)
    replica.submit(*(make_request(name, range(5), sampling=late) for name in "efgh"))
    replica.run()
    assert [len(output.scheduled) for output in replica.steps] == [4, *[8] * 5]


def test_choices_fork_before_the_leader_goes_on() -> None:
    replica = Replica(16, depth=2)
    replica.submit(make_request("n", range(6), n=3), make_request("a", range(50, 55)))
    replica.submit(make_request("b", range(60, 65)))
    replica.fill()
    assert [keys(output) for output in replica.in_flight] == [["n", "a", "b"], ["a", "b"]]
    replica.take()
    assert [c.state for c in replica.scheduler.requests["n"].choices] == [ChoiceState.RUNNING] * 3
    replica.run()


@pytest.mark.parametrize("host_slots", [0, 40])
def test_what_a_victim_has_in_flight_is_dropped_and_drawn_again(host_slots: int) -> None:
    replica = Replica(5, host_slots=host_slots, depth=2)
    replica.submit(*(make_request(f"r{i}", range(9 * i, 9 * i + 7), max_tokens=9) for i in (1, 2)))
    victim = replica.choice("r2")
    while True:
        before = len(replica.outputs["r2", 0])
        replica.fill()
        if victim.preemptions:
            break
        replica.take()
    oldest = replica.in_flight[0]
    assert "r2" in keys(oldest)
    assert (victim.in_flight_tokens, victim.in_flight_draws) == (0, 0)
    replica.take()
    assert len(replica.outputs["r2", 0]) == before
    replica.run()  # compares with an undisturbed run
    assert len(replica.outputs["r2", 0]) == 9


@pytest.mark.parametrize(("num_blocks", "length", "kept"), [(5, 10, 2), (4, 8, 1)])
def test_a_prefill_in_flight_is_kept_on_the_host(num_blocks: int, length: int, kept: int) -> None:
    """The victim's results are not known, but its blocks are full by the time they are saved. The
    last known token is computed again: nobody took the one that it gave."""
    replica = Replica(num_blocks, host_slots=40, depth=2)
    replica.submit(make_request("r1", range(6), max_tokens=9))
    replica.step()
    replica.submit(make_request("r2", range(50, 50 + length), max_tokens=2))
    victim = replica.choice("r2")
    replica.step()
    replica.fill()
    assert keys(replica.in_flight[0]) == ["r1", "r2"]
    assert (victim.preemptions, victim.num_known_tokens) == (1, length)
    assert len(victim.host_blocks) == kept
    replica.run()
    receipt = replica.last["r2", 0].receipt
    assert receipt is not None
    assert (receipt.swaps, receipt.restored_tokens, receipt.recomputed_tokens) == (1, 4 * kept, 0)


def test_integrity_sees_what_is_in_flight_of_a_choice_that_does_not_run() -> None:
    replica = Replica(8, max_num_seqs=1)
    replica.submit(make_request("runs", range(4)), make_request("waits", range(4)))
    replica.step()
    replica.choice("waits").in_flight_draws = 1
    with pytest.raises(AssertionError, match="in flight"):
        replica.scheduler.check_integrity()


def test_an_id_that_is_used_again_gets_no_result_of_its_forerunner() -> None:
    replica = Replica(16, depth=2)
    replica.submit(make_request("a", range(5), n=2, max_tokens=8))
    replica.step()
    replica.step()
    stale = replica.in_flight[0]
    assert stale.scheduled[-1].key == ("a", 1)
    replica.abort("a")
    replica.outputs.clear()
    replica.aborted.clear()
    replica.submit(make_request("a", range(70, 79), max_tokens=3))
    replica.fill()
    assert replica.scheduler.find(stale.scheduled[0]) is None
    assert replica.scheduler.find(stale.scheduled[1]) is None
    replica.take()
    assert replica.outputs["a", 0] == []
    while replica.has_work:
        replica.step()
    assert replica.outputs["a", 0] == reference(replica.requests["a"], 0, replica.limit)[0]


@pytest.mark.parametrize("index", [None, 0, 1])
def test_an_abort_between_two_steps_in_flight(index: int | None) -> None:
    replica = Replica(16, depth=2)
    replica.submit(make_request("a", range(6), n=2, max_tokens=6), make_request("b", range(7)))
    for _ in range(3):
        replica.step()
    assert "a" in keys(replica.in_flight[0])
    replica.abort("a", index)
    replica.run()
    assert len(replica.outputs["b", 0]) == 4
