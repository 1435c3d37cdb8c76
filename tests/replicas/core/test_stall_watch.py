"""What is told of requests that wait after a preemption."""

from __future__ import annotations

from itertools import pairwise

from replicas.core.stall_watch import PERIOD_S
from replicas.protocol import TokenDelta
from tests.replicas.core.builders import make_request
from tests.replicas.core.harness import Replica


def waits(replica: Replica) -> list[TokenDelta]:
    outcome = replica.finish_step(replica.schedule())
    return [delta for delta in outcome.deltas if delta.wait_s is not None]


def test_a_preempted_request_is_told_of_while_it_waits_and_no_longer() -> None:
    replica = Replica(4, token_s=0.1)
    replica.submit(make_request("a", range(7), max_tokens=8), make_request("b", range(7, 14)))
    told: list[tuple[float, TokenDelta]] = []
    while replica.scheduler.has_work:
        told += [(replica.now, delta) for delta in waits(replica)]
    assert told
    for _, delta in told:
        assert (delta.request_id, delta.choice, delta.token_ids) == ("b", 0, ())
        assert delta.receipt is not None
        assert delta.receipt.preemptions == 1
    times = [when for when, _ in told]
    assert all(later - earlier >= PERIOD_S for earlier, later in pairwise(times))
    replica.check_idle()


def test_the_wait_is_what_the_running_ones_have_to_come() -> None:
    replica = Replica(4, token_s=0.5)
    replica.submit(make_request("a", range(7), max_tokens=9), make_request("b", range(7, 14)))
    told: list[TokenDelta] = []
    while not told:
        told = waits(replica)
    left = 9 - len(replica.outputs["a", 0])
    step_s = replica.scheduler.costs.decode.seconds
    assert told[0].wait_s == left * step_s > 0


def test_a_request_with_a_choice_that_runs_is_not_told_of() -> None:
    replica = Replica(5)
    replica.submit(make_request("a", range(6), n=3, max_tokens=12))
    silent = 0
    while replica.scheduler.has_work:
        told = waits(replica)
        running, waiting = replica.scheduler.running, replica.scheduler.waiting
        assert not (told and running)
        silent += bool(running and any(choice.preempted_at for choice in waiting))
    assert silent > 0
    replica.check_idle()


def test_who_waits_for_the_first_time_is_not_told_of() -> None:
    replica = Replica(3)
    replica.submit(make_request("a", range(7)), make_request("b", range(7, 14)))
    while replica.scheduler.has_work:
        assert not waits(replica)
    assert replica.scheduler.stats.preemptions == 0
