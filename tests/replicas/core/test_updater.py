"""What a step's results change: deltas, times and counters."""

from __future__ import annotations

from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler_output import SampledToken, StepResult
from replicas.protocol import FinishReason, TokenLogprobs
from tests.replicas.core.builders import make_request
from tests.replicas.core.harness import Replica


def test_times_of_a_request() -> None:
    """It arrives at 0, starts at 2, has its first token at 4 and its last at 7."""
    replica = Replica(16, budget=4, max_num_seqs=1)
    replica.submit(make_request("before", range(4), max_tokens=1))
    replica.submit(make_request("a", range(50, 62), max_tokens=4))
    replica.step()
    outcomes = []
    while replica.scheduler.has_work:
        outcomes.append(replica.finish_step(replica.schedule()))
    assert [outcome.first_token_s for outcome in outcomes] == [(), (), (4.0,), (), (), ()]
    assert [outcome.inter_token_s for outcome in outcomes] == [(), (), (), *[(1.0,)] * 3]
    finished = replica.finished[-1]
    assert finished.reason is FinishReason.LENGTH
    assert (finished.num_prompt_tokens, finished.num_output_tokens) == (12, 4)
    assert (finished.max_tokens, finished.preemptions) == (4, 0)
    assert (finished.queue_s, finished.prefill_s, finished.decode_s) == (2.0, 2.0, 3.0)
    assert finished.e2e_s == 7.0


def test_times_of_an_aborted_request() -> None:
    replica = Replica(16, budget=4, max_num_seqs=1)
    replica.submit(make_request("a", range(12)), make_request("queued", range(4)))
    replica.step()
    replica.now += 4
    replica.abort("a")
    replica.abort("queued")
    prefilling, queued = replica.finished
    assert (prefilling.queue_s, prefilling.prefill_s, prefilling.decode_s) == (1.0, 4.0, 0.0)
    assert (queued.queue_s, queued.prefill_s, queued.e2e_s) == (5.0, 0.0, 5.0)
    replica.check_idle()


def test_first_token_time_counts_once_a_request() -> None:
    replica = Replica(16, max_num_seqs=2)
    replica.submit(make_request("a", range(6), n=4))
    outcome = replica.finish_step(replica.schedule())
    assert outcome.first_token_s == (1.0,)
    assert outcome.inter_token_s == ()
    assert replica.scheduler.stats.prompt_tokens == 6
    assert replica.scheduler.stats.generation_tokens == 4
    replica.run()


def test_logprobs_travel_with_their_token() -> None:
    replica = Replica(16)
    sampling = SamplingParams(max_tokens=2, seed=1, ignore_eos=True, logprobs=1)
    replica.submit(make_request("a", range(4), sampling=sampling))
    output = replica.schedule()
    logprobs = TokenLogprobs(-0.5, 1, ((3, -0.5),))
    result = StepResult({("a", 0): SampledToken(3, logprobs)}, {})
    (delta,) = replica.updater.update(output, result, replica.now).deltas
    assert (delta.token_ids, delta.logprobs) == ((3,), (logprobs,))
    assert (delta.finish_reason, delta.stop_token_id) == (None, None)
    assert delta.receipt is not None  # with the first one, what it found and waited for


def test_an_outcome_holds_only_its_own_step() -> None:
    replica = Replica(16)
    replica.submit(make_request("a", range(4), max_tokens=3))
    deltas = [replica.finish_step(replica.schedule()).deltas for _ in range(3)]
    assert [len(each) for each in deltas] == [1, 1, 1]
    assert [each[0].finish_reason for each in deltas] == [None, None, FinishReason.LENGTH]
    replica.check_idle()


def test_finish_reasons_are_counted() -> None:
    replica = Replica(32)
    stop = SamplingParams(max_tokens=1000, seed=1, stop_token_ids=(0, 1, 2, 3, 4, 5, 6))
    replica.submit(make_request("stops", range(4), sampling=stop))
    replica.submit(make_request("ends", range(4), max_tokens=2), make_request("goes", range(4)))
    replica.step()
    assert replica.last["stops", 0].finish_reason is FinishReason.STOP
    replica.abort("goes")
    while replica.scheduler.has_work:
        replica.step()
    assert replica.scheduler.stats.finished == {
        FinishReason.STOP: 1,
        FinishReason.LENGTH: 1,
        FinishReason.ABORT: 1,
        FinishReason.ERROR: 0,
    }
