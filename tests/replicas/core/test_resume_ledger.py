"""Each preemption is told of once, with all of its stall, whatever becomes of its choice."""

from __future__ import annotations

from typing import Any

import pytest

from replicas.core.preemption.preempter import PreemptionMode
from replicas.core.scheduler_output import ResumeCost
from replicas.protocol import GenerateRequest
from tests.replicas.core.builders import make_request
from tests.replicas.core.harness import BOTH_DEPTHS, ONE_STEP, Replica
from tests.replicas.core.test_scheduler_preemption import own_prompts

pytestmark = BOTH_DEPTHS

SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE
FORKS = [make_request(f"r{i}", range(100 * i, 100 * i + 9), n=4, max_tokens=16) for i in range(4)]

SLOW: dict[str, Any] = {
    "num_blocks": 12,
    "mode": SWAP,
    "copy_steps": 3,
    "caching": False,
    "min_progress_tokens": 1,
}


@pytest.mark.parametrize(
    ("requests", "setup"),
    [
        (
            own_prompts(8, 9, max_tokens=30),
            {"num_blocks": 24, "mode": RECOMPUTE, "budget": 8, "min_progress_tokens": 1},
        ),
        (own_prompts(8, 8, max_tokens=12), SLOW),
        (FORKS, {"num_blocks": 20, "mode": SWAP, "min_progress_tokens": 1}),
    ],
    ids=["recompute", "slow copies", "forks"],
)
def test_every_preemption_is_told_of(
    requests: list[GenerateRequest], setup: dict[str, Any]
) -> None:
    replica = Replica(host_slots=100, **setup)
    replica.submit(*requests)
    costs: list[ResumeCost] = []
    while replica.has_work:
        replica.fill()
        costs += replica.take().resumed
    assert len(costs) == replica.scheduler.stats.preemptions >= 5
    receipts = [delta.receipt for delta in replica.last.values() if delta.receipt]
    assert sum(cost.stall_s for cost in costs) == sum(each.stall_s for each in receipts)
    assert sum(cost.swapped for cost in costs) == replica.scheduler.stats.swaps


def run_to_preemption(replica: Replica) -> str:
    """Gives the request that is preempted."""
    while not replica.scheduler.stats.preemptions:
        replica.step()
    return replica.scheduler.waiting[0].request.id


def test_who_is_aborted_while_it_waits_has_stalled_till_then() -> None:
    replica = Replica(12)
    replica.submit(*own_prompts(4, 8, max_tokens=12))
    name = run_to_preemption(replica)
    preempted_at = replica.choice(name).preempted_at
    assert preempted_at is not None
    replica.step()
    outcome = replica.updater.abort(name, None, replica.now)
    (cost,) = outcome.resumed
    assert (cost.key, cost.caught_up) == ((name, 0), False)
    assert cost.stall_s == replica.now - preempted_at > 0
    (delta,) = outcome.deltas
    assert delta.receipt is not None
    assert delta.receipt.stall_s == cost.stall_s
    assert replica.scheduler.resumes.take() == ()


@ONE_STEP
def test_who_is_preempted_anew_before_it_draws_had_not_caught_up() -> None:
    """Its prediction is not to be compared with what it cost till then."""
    replica = Replica(host_slots=100, **SLOW)
    replica.submit(*own_prompts(8, 8, max_tokens=12))
    costs: list[ResumeCost] = []
    while replica.has_work:
        costs += replica.finish_step(replica.schedule()).resumed
    (halted,) = (cost for cost in costs if not cost.caught_up)
    others = [cost for cost in costs if cost.key == halted.key and cost.caught_up]
    assert others, "the one that followed is told of as well"
