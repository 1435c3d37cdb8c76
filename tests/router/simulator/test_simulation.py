"""Whole simulations: nothing is lost, time is right, and equal inputs give equal results."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.protocol import FinishReason
from router.policies.power_of_two import PowerOfTwo
from router.policies.prefix_aware import PrefixAware
from router.policies.round_robin import RoundRobin
from router.simulator.measurements import Limits
from router.simulator.trace import Trace, TraceRequest
from tests.router.simulator.harness import (
    BLOCK,
    families,
    make_settings,
    make_trace,
    report,
    simulate,
)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_blocks=st.integers(10, 40),
    host_blocks=st.sampled_from((0, 0, 4, 30)),
    num_replicas=st.integers(1, 3),
    replicas_a_node=st.integers(1, 3),
    gap_s=st.sampled_from((0.0001, 0.02, 0.2)),
    feed_delay_s=st.sampled_from((0.0, 0.003, 0.5)),
    look_ahead=st.booleans(),
)
def test_every_request_ends_with_its_tokens_and_every_block_returns(
    seed: int,
    num_blocks: int,
    host_blocks: int,
    num_replicas: int,
    replicas_a_node: int,
    gap_s: float,
    feed_delay_s: float,
    look_ahead: bool,
) -> None:
    trace = families(seed, 25, gap_s=gap_s, outputs=24)
    replica = make_settings(num_blocks, host_blocks=host_blocks, look_ahead=look_ahead)
    _, measured = simulate(
        trace,
        replica,
        num_replicas=num_replicas,
        replicas_a_node=replicas_a_node,
        feed_delay_s=feed_delay_s,
    )
    assert measured.refused == 0
    assert measured.prompt_tokens == trace.num_prompt_tokens
    assert measured.output_tokens == trace.num_output_tokens


def test_a_lone_request_takes_what_the_roofline_says() -> None:
    trace = make_trace([(5.0, range(5), 3)])  # 20 tokens, in steps of 16 and 4
    replica = make_settings()
    _, measured = simulate(trace, replica, num_replicas=1)
    seconds = replica.machine.seconds
    chunk = seconds(16, 16 * 17 // 2, 0, 16)
    rest = seconds(4, 17 + 18 + 19 + 20, 1, 20)
    decodes = [seconds(1, 21, 1, 21), seconds(1, 22, 1, 22)]
    assert measured.ttft_s[0] == pytest.approx(chunk + rest)
    assert list(measured.gaps_s) == pytest.approx(decodes)
    assert measured.e2e_s[0] == pytest.approx(chunk + rest + sum(decodes))
    assert measured.steps == 4
    assert measured.start_s == 5.0
    assert measured.last_end_s == pytest.approx(5.0 + measured.e2e_s[0])


def test_a_repeated_prompt_is_found_but_for_its_last_token() -> None:
    trace = make_trace([(0.0, range(5), 2), (60.0, range(5), 2)])
    result = report(trace, make_settings(), num_replicas=4)
    assert result.device_hit_rate == 16 / 40
    assert result.imbalance == 4.0, "the second went where the first had been"


def test_equal_inputs_give_equal_results() -> None:
    trace, replica = families(3, 60), make_settings(24, host_blocks=8)

    def once(seed: int) -> object:
        return report(trace, replica, PowerOfTwo(random.Random(seed)), num_replicas=4)

    assert once(1) == once(1)
    assert once(1) != once(2)
    assert report(trace, replica) == report(trace, replica)


def test_prefix_aware_finds_more_than_turns_do() -> None:
    trace, replica = families(5, 150, prefixes=8), make_settings(40)
    aware = report(trace, replica, PrefixAware(), num_replicas=4)
    turns = report(trace, replica, RoundRobin(), num_replicas=4)
    assert aware.device_hit_rate > 1.3 * turns.device_hit_rate
    assert turns.imbalance == pytest.approx(1.0, abs=0.05)


def test_little_kv_preempts_by_recompute_without_a_host_tier() -> None:
    trace = make_trace([(0.001 * n, (n,), 40) for n in range(6)])
    result = report(trace, make_settings(24), num_replicas=1)
    assert result.preemptions_recompute > 0
    assert result.preemptions_swap == result.restored_tokens == 0
    assert result.recomputed_tokens > 0


def test_little_kv_preempts_by_swap_with_one() -> None:
    trace = make_trace([(0.001 * n, (n,), 40) for n in range(6)])
    result = report(trace, make_settings(24, host_blocks=64), num_replicas=1)
    assert result.preemptions_swap > 0
    assert result.restored_tokens > 0
    assert result.output_tokens == 6 * 40


def test_evicted_prefixes_are_found_in_the_host_tier() -> None:
    prompts = [range(10 * n, 10 * n + 10) for n in range(4)]
    trace = make_trace([(float(at), prompts[at % 4], 2) for at in range(12)])
    bare = report(trace, make_settings(16), num_replicas=1)
    tiered = report(trace, make_settings(16, host_blocks=64), num_replicas=1)
    assert bare.device_hit_rate + bare.host_hit_rate < 0.1
    assert tiered.host_hit_rate > 0.5
    assert tiered.ttft_s.mean < bare.ttft_s.mean


def test_replicas_of_a_node_read_each_others_host_tiers() -> None:
    # In turns: 0, 1 and 4 go to the first replica, 2, 3 and 5 to the second; then crosswise.
    prompts = (range(10 * n, 10 * n + 10) for n in (0, 2, 1, 3, 4, 5, 2, 0, 3, 1))
    trace = make_trace([(float(at), ids, 2) for at, ids in enumerate(prompts)])
    replica = make_settings(12, host_blocks=64)
    apart = report(trace, replica, RoundRobin(), num_replicas=2)
    together = report(trace, replica, RoundRobin(), num_replicas=2, replicas_a_node=2)
    assert apart.host_hit_rate == 0.0
    assert together.host_hit_rate == pytest.approx(4 * 9 / 100)


def test_a_faster_trace_ends_sooner_and_waits_longer() -> None:
    trace, replica = families(7, 80, gap_s=0.05), make_settings(64)
    slow, fast = report(trace, replica), report(trace.faster(4.0), replica)
    assert fast.simulated_s < slow.simulated_s
    assert fast.ttft_s.mean > 1.5 * slow.ttft_s.mean
    assert fast.goodput_rps != slow.goodput_rps
    assert (fast.output_tokens, fast.requests) == (slow.output_tokens, slow.requests)


def test_idle_time_costs_nothing_and_makes_nothing_stale() -> None:
    busy = make_trace([(float(n), (n, n + 1), 3) for n in range(20)])
    lazy = busy.faster(1e-4)
    replica = make_settings()
    assert (
        report(lazy, replica, num_replicas=3).steps == report(busy, replica, num_replicas=3).steps
    )


def test_what_can_never_be_served_is_counted() -> None:
    trace = make_trace([(0.0, range(5), 2), (0.1, range(100, 120), 2)])
    result = report(trace, make_settings(num_blocks=10))
    assert (result.requests, result.refused) == (1, 1)


def test_an_output_ends_where_the_context_does() -> None:
    trace = make_trace([(0.0, range(5), 30)])
    result = report(trace, make_settings(max_model_len=26))
    assert (result.requests, result.output_tokens) == (1, 6)


def test_clients_do_not_say_how_long_an_output_gets() -> None:
    """The scheduler's look-ahead and the router would else know more than in life."""
    requests = (TraceRequest(0.0, 4, 3, (0,)), TraceRequest(0.0, 4, 50, (1,)))
    _, measured = simulate(Trace(requests, BLOCK), make_settings())
    assert measured.output_tokens == 53
    assert all(each.finished[FinishReason.LENGTH] == 0 for each in measured.stats)
    assert measured.total("generation_tokens") == 53


def test_a_late_feed_costs_hits_and_nothing_else() -> None:
    trace, replica = families(11, 100, prefixes=6, gap_s=0.05), make_settings(40)
    now = report(trace, replica, num_replicas=4)
    late = report(trace, replica, num_replicas=4, feed_delay_s=2.0)
    assert late.output_tokens == now.output_tokens
    assert late.device_hit_rate > 0.0


def test_many_replicas_cost_what_is_done_on_them() -> None:
    trace = families(13, 30, gap_s=1.0)
    few, many = (report(trace, make_settings(), num_replicas=n) for n in (4, 400))
    assert many.steps <= few.steps * 1.5
    assert many.requests == few.requests == 30


def test_goodput_counts_requests_within_both_limits() -> None:
    trace = make_trace([(0.0, range(2), 5), (0.0, range(10, 12), 5), (0.0, range(20, 22), 5)])
    _, measured = simulate(trace, make_settings(), num_replicas=1)
    times = sorted(measured.ttft_s)
    gap = max(measured.mean_gap_s)
    for count, limit in enumerate(times, 1):
        assert measured.report(Limits(limit, gap)).good_share == count / 3
    assert measured.report(Limits(times[-1], gap / 1e6)).good_share == 0.0
    whole = measured.report(Limits(times[-1], gap))
    assert whole.goodput_rps == pytest.approx(3 / whole.simulated_s)


def test_a_trace_without_requests_gives_an_empty_report() -> None:
    result = report(make_trace([]), make_settings())
    assert (result.requests, result.steps, result.goodput_rps) == (0, 0, 0.0)
