"""What one step computes: budget, order, admission, limits, refusals and aborts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from replicas.core.request import ChoiceState
from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler import RequestRefusedError
from replicas.core.scheduler_output import SchedulerOutput
from replicas.protocol import FinishReason
from tests.replicas.core.builders import make_request
from tests.replicas.core.fake_device import reference
from tests.replicas.core.harness import BOTH_DEPTHS, ONE_STEP, Replica

pytestmark = BOTH_DEPTHS


def counts(output: SchedulerOutput) -> dict[str, int]:
    """Tokens computed for each request, in the order of the step."""
    return {item.key[0]: len(item.token_ids) for item in output.scheduled}


def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget() -> None:
    replica = Replica(16, budget=8)
    replica.submit(make_request("a", range(20), max_tokens=3))
    assert [counts(replica.step())["a"] for _ in range(5)] == [8, 8, 4, 1, 1]
    replica.run()


@ONE_STEP
def test_one_step_holds_decodes_and_prefills() -> None:
    replica = Replica(16, budget=10)
    replica.submit(make_request("a", range(4)))
    replica.step()
    replica.submit(make_request("b", range(50, 56)), make_request("c", range(60, 68)))
    assert counts(replica.step()) == {"a": 1, "b": 6, "c": 3}
    replica.run()


@ONE_STEP
def test_decodes_come_before_a_prefill_of_better_rank() -> None:
    replica = Replica(32, budget=8, by_priority=True)
    replica.submit(make_request("late", range(4), max_tokens=10, priority=1))
    replica.step()
    replica.submit(make_request("first", range(50, 90), priority=0))
    for _ in range(3):
        assert counts(replica.step()) == {"late": 1, "first": 7}
    replica.run()


def test_nobody_starves_where_the_budget_is_one_token_a_seat() -> None:
    replica = Replica(64, budget=4, max_num_seqs=4)
    replica.submit(*(make_request(f"r{i}", range(i * 100, i * 100 + 9)) for i in range(6)))
    while replica.scheduler.has_work:
        running = {c.key for c in replica.scheduler.running}
        assert running <= {item.key for item in replica.step().scheduled}
    replica.check_idle()


def test_max_num_seqs_bounds_the_running_choices() -> None:
    replica = Replica(64, max_num_seqs=2)
    replica.submit(*(make_request(f"r{i}", range(i * 100, i * 100 + 4)) for i in range(5)))
    assert counts(replica.step()) == {"r0": 4, "r1": 4}
    replica.run()


def test_admission_needs_room_for_the_whole_history_not_for_a_chunk() -> None:
    replica = Replica(8, budget=8)
    replica.submit(make_request("a", range(12)), make_request("b", range(50, 74)))
    replica.step()
    assert counts(replica.step()) == {"a": 4}, "b's chunk would fit, b would not"
    replica.run()


def test_admission_is_strictly_in_order() -> None:
    replica = Replica(8)
    replica.submit(
        make_request("a", range(12)),
        make_request("long", range(50, 74)),
        make_request("short", range(90, 92)),
    )
    assert counts(replica.step()) == {"a": 12}
    replica.run()


def test_the_watermark_stays_free_unless_nothing_runs() -> None:
    replica = Replica(10, watermark=0.2)
    replica.submit(make_request("a", range(36)), make_request("b", range(50, 54)))
    assert counts(replica.step()) == {"a": 36}, "alone it may take more than the watermark leaves"
    replica.run()

    replica = Replica(10, watermark=0.2)
    replica.submit(
        make_request("a", range(16)),
        make_request("b", range(50, 66)),
        make_request("c", range(90, 91)),
    )
    assert counts(replica.step()) == {"a": 16, "b": 16}, "2 blocks are free and stay so"
    replica.run()


@pytest.mark.parametrize(("by_priority", "order"), [(True, "cdab"), (False, "abcd")])
def test_order_by_priority_then_arrival(by_priority: bool, order: str) -> None:
    replica = Replica(8, max_num_seqs=1, by_priority=by_priority)
    for name, priority in zip("abcd", (1, 1, 0, 0), strict=True):
        replica.submit(make_request(name, range(4), max_tokens=1, priority=priority))
    assert "".join(next(iter(counts(replica.step()))) for _ in range(4)) == order
    replica.check_idle()


@pytest.mark.parametrize(
    ("length", "max_model_len", "numbers"),
    [(32, 100, ("32", "32")), (40, 100, ("40", "32")), (20, 20, ("20", "20"))],
)
def test_what_can_never_fit_is_refused_with_both_numbers(
    length: int, max_model_len: int, numbers: tuple[str, str]
) -> None:
    """O01: it would sit at the head of the queue for ever."""
    replica = Replica(8, max_model_len=max_model_len)
    replica.submit(make_request("fits", range(19)))
    with pytest.raises(RequestRefusedError) as refused:
        replica.submit(make_request("a", range(100, 100 + length)))
    words = str(refused.value).split()
    assert numbers[0] in words
    assert words.count(numbers[1]) >= 1 + (numbers[0] == numbers[1])
    replica.submit(make_request("b", range(50, 54)))
    replica.run()
    assert len(replica.last) == 2


def test_the_longest_prompt_that_fits_is_served() -> None:
    replica = Replica(8)
    replica.submit(make_request("a", range(31), max_tokens=1))
    replica.run()


def test_empty_prompts_and_ids_in_use_are_refused() -> None:
    replica = Replica(8)
    replica.submit(make_request("a", range(4)))
    with pytest.raises(RequestRefusedError, match="empty"):
        replica.submit(make_request("b", ()))
    with pytest.raises(RequestRefusedError, match="'a' is in use"):
        replica.submit(make_request("a", range(4)))
    replica.run()


@pytest.mark.parametrize(("max_model_len", "length"), [(10_000, 17), (14, 14)])
def test_outgrowing_the_pool_or_the_context_ends_with_length(
    max_model_len: int, length: int
) -> None:
    replica = Replica(4, max_model_len=max_model_len)
    replica.submit(make_request("a", range(10), max_tokens=1000))
    replica.run()
    assert replica.last["a", 0].finish_reason is FinishReason.LENGTH
    assert len(replica.known(("a", 0))) == length
    replica.submit(make_request("b", range(50, 60)))  # the replica lives on
    replica.run()


def test_stop_tokens_end_a_choice_but_not_before_min_tokens() -> None:
    free = make_request("a", range(4), max_tokens=30)
    outputs, _ = reference(free, 0, 1000)
    stop = outputs[3]
    first = outputs.index(stop)
    assert stop in outputs[first + 1 :], "the test needs it twice"
    for min_tokens in (0, first + 2):
        replica = Replica(16)
        sampling = replace(free.sampling, stop_token_ids=(stop,), min_tokens=min_tokens)
        replica.submit(replace(free, sampling=sampling))
        while replica.scheduler.has_work:
            replica.step()
        last = replica.last["a", 0]
        end = outputs.index(stop, max(0, min_tokens - 1))
        assert replica.outputs["a", 0] == outputs[: end + 1]
        assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, stop)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_end_of_text_ends_a_choice_unless_ignored(ignore_eos: bool) -> None:
    replica = Replica(16)
    sampling = SamplingParams(max_tokens=40, seed=1, ignore_eos=ignore_eos)
    replica.submit(make_request("a", range(4), sampling=sampling))
    replica.run()
    expected = FinishReason.LENGTH if ignore_eos else FinishReason.STOP
    assert replica.last["a", 0].finish_reason is expected


def test_history_travels_with_a_draw_only_where_it_is_needed() -> None:
    replica = Replica(16)
    penalty = SamplingParams(max_tokens=3, seed=1, ignore_eos=True, frequency_penalty=1.0)
    replica.submit(make_request("a", range(4), sampling=penalty), make_request("b", range(4)))
    replica.step()
    drawn = {d.key[0]: d.output_token_ids for i in replica.step().scheduled for d in i.draws}
    assert drawn == {"a": tuple(replica.outputs["a", 0][:1]), "b": ()}
    replica.run()


@ONE_STEP
def test_aborts_work_in_every_state() -> None:
    replica = Replica(9, budget=8, max_num_seqs=3)
    replica.submit(
        make_request("decoding", range(4), max_tokens=30),
        make_request("prefilling", range(50, 66), n=2),
        make_request("queued", range(70, 74)),
    )
    replica.step()
    replica.step()
    assert replica.choice("decoding").output_token_ids
    assert 0 < replica.choice("prefilling").num_computed_tokens < 16
    assert replica.choice("prefilling", 1).state is ChoiceState.PENDING
    replica.abort("prefilling", 1)
    replica.abort("prefilling", 0)
    replica.abort("queued")
    assert list(replica.scheduler.requests) == ["decoding"]
    replica.abort("decoding")
    replica.check_idle()


def test_an_abort_while_preempted_leaves_the_queue() -> None:
    replica = Replica(4)
    replica.submit(make_request("a", range(7), max_tokens=8), make_request("b", range(50, 57)))
    while not replica.scheduler.stats.preemptions:
        replica.step()
    assert replica.choice("b").state is ChoiceState.WAITING
    replica.abort("b")
    assert not replica.scheduler.waiting
    replica.run()


def test_aborting_what_is_unknown_or_ended_is_fine() -> None:
    replica = Replica(8)
    replica.submit(make_request("a", range(4), n=2))
    for _ in range(2):
        replica.abort("a", 1)
        replica.abort("nobody")
        replica.abort("a", 7)
    replica.run()
    replica.abort("a")
    assert replica.aborted == {("a", 1)}


def test_results_of_an_aborted_choice_are_dropped() -> None:
    replica = Replica(8)
    replica.submit(make_request("a", range(4)), make_request("b", range(50, 54)))
    replica.step()
    output = replica.schedule()
    replica.abort("a")
    outcome = replica.finish_step(output)
    assert [delta.request_id for delta in outcome.deltas] == ["b"]
    replica.run()


@ONE_STEP
def test_results_of_an_older_epoch_are_dropped() -> None:
    replica = Replica(4)
    replica.submit(make_request("a", range(7)), make_request("b", range(50, 57)))
    replica.step()
    stale = replica.schedule()
    result = replica.device.run(stale, replica.requests, replica.known)
    replica.updater.update(stale, result, replica.now)
    for name in "ab":  # deliver by hand: the result is needed again
        replica.outputs[name, 0].append(result.sampled[name, 0].token_id)
    while replica.scheduler.running != [replica.scheduler.requests["b"].choices[0]]:
        replica.step()
    choice = replica.choice("b")
    assert choice.preemptions == 1
    before = (choice.num_computed_tokens, list(choice.output_token_ids))
    outcome = replica.updater.update(stale, result, replica.now)
    assert outcome.deltas == ()
    assert (choice.num_computed_tokens, choice.output_token_ids) == before
    replica.run()


def test_integrity_sees_queues_that_disagree_with_states() -> None:
    replica = Replica(8, max_num_seqs=1)
    replica.submit(make_request("a", range(4)), make_request("b", range(4)))
    replica.step()
    scheduler = replica.scheduler
    for queue in (scheduler.running, scheduler.waiting):
        (choice,) = queue
        queue.clear()
        with pytest.raises(AssertionError, match="are not those in the queue"):
            scheduler.check_integrity()
        queue.append(choice)
    waiting = scheduler.waiting[0]
    waiting.blocks = scheduler.kv.pool.allocate(1)
    with pytest.raises(AssertionError, match="does not run holds blocks"):
        scheduler.check_integrity()
    scheduler.kv.release(waiting)
    replica.run()
