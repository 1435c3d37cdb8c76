"""Who gives way under each policy, and whether its KV is kept: by what it costs."""

from __future__ import annotations

from statistics import fmean, median

import pytest

from replicas.core.block_transfer import Restore, Save
from replicas.core.cost_model import CostModel, Rates
from replicas.core.preemption.cheapest import Cheapest
from replicas.core.preemption.last_admitted import LastAdmitted
from replicas.core.preemption.policy import Candidate, PreemptionPolicy
from replicas.core.preemption.preempter import Preempter, PreemptionMode
from replicas.core.preemption.priority import Priority
from replicas.core.request import Choice, Request
from tests.replicas.core.builders import make_kv, make_request
from tests.replicas.core.harness import Replica
from tests.replicas.core.steady_machine import SteadyMachine
from tests.replicas.core.test_scheduler_preemption import own_prompts, receipts


def candidate(
    number: int, *, priority: int = 0, freed: int = 1, cost_s: float = 1.0, preemptions: int = 0
) -> Candidate:
    data = make_request(str(number), [1])
    choice: Choice = Request(data, rank=(priority, number), arrived_at=0.0).choices[0]
    choice.epoch, choice.preemptions = number, preemptions
    return Candidate(choice, freed_blocks=lambda: freed, cost_s=lambda: cost_s)


@pytest.mark.parametrize(
    ("policy", "expected"), [(LastAdmitted(), "4"), (Priority(), "2"), (Cheapest(), "3")]
)
def test_each_policy_has_its_victim(policy: PreemptionPolicy, expected: str) -> None:
    candidates = [
        candidate(1, freed=10, cost_s=5.0),
        candidate(2, priority=1, freed=2, cost_s=1.0),
        candidate(3, freed=8, cost_s=1.0),
        candidate(4, freed=1, cost_s=1.0),
    ]
    assert policy.choose(candidates).choice.request.id == expected


def test_nobody_is_the_cheapest_for_ever() -> None:
    cheap, dear = candidate(1, freed=8, preemptions=0), candidate(2, freed=1)
    chosen = []
    for _ in range(8):
        victim = Cheapest().choose([cheap, dear]).choice
        chosen.append(victim.request.id)
        victim.preemptions += 1
    assert chosen[0] == "1"
    assert chosen.count("2") >= 2


def test_who_frees_nothing_is_spared_while_somebody_frees_something() -> None:
    """The last admitted shares all its blocks with the choice it forked off."""
    kv = make_kv(8, 4)
    preempter = Preempter(kv, LastAdmitted(), PreemptionMode.RECOMPUTE)
    twins = Request(make_request("twins", range(8), n=2), rank=(0, 1), arrived_at=0.0)
    own = Request(make_request("own", range(50, 58)), rank=(0, 2), arrived_at=0.0).choices[0]
    leader, child = twins.choices
    for number, choice in enumerate((own, leader), 1):
        assert kv.admit(choice, 0)
        choice.num_computed_tokens, choice.epoch = 8, number
    kv.fork(leader, child)
    child.epoch = 3
    assert preempter.choose([own, child]) is own
    assert preempter.choose([child]) is child, "nobody else is left"
    assert preempter.choose([]) is None
    kv.release(leader)
    assert preempter.choose([own, child]) is child, "now its blocks are its own"


@pytest.mark.parametrize(
    ("gib_per_s", "context", "swaps"), [(0.05, 1500, False), (10.0, 1500, True), (10.0, 200, True)]
)
@pytest.mark.parametrize("caching", [False, True], ids=["alone", "caching and spilling"])
def test_auto_decides_by_what_it_has_measured(
    gib_per_s: float, context: int, swaps: bool, caching: bool
) -> None:
    """It begins with a guess that is wrong by far, and learns from its first copies."""
    machine = SteadyMachine(
        context,
        gib_per_s,
        guess=0.2 if swaps else 1.0,
        caching=caching,
        spill_tokens=128 if caching else None,
    )
    machine.serve(own_prompts(120, context, max_tokens=256))
    assert machine.stats.preemptions >= 20
    assert machine.swap_share >= 0.9 if swaps else machine.swap_share <= 0.1
    if caching:  # what went to the host before the first copies had ended, or else all there was
        spilled = machine.stats.spilled_blocks
        assert spilled > 500 if swaps else 0 < spilled < 50


@pytest.mark.parametrize("mode", [PreemptionMode.AUTO, PreemptionMode.RECOMPUTE])
def test_a_host_tier_that_costs_more_than_computing_is_left_alone(mode: PreemptionMode) -> None:
    """The start-up probe said so."""
    machine = SteadyMachine(1500, 0.05, mode=mode, caching=True, spill_tokens=512)
    machine.serve(own_prompts(30, 1500, max_tokens=256))
    assert machine.stats.preemptions >= 3
    assert machine.copies == []


def test_recompute_writes_nothing_for_a_victim_and_spills_prefixes_all_the_same() -> None:
    machine = SteadyMachine(
        1500, 10.0, mode=PreemptionMode.RECOMPUTE, caching=True, spill_tokens=512
    )
    machine.serve(own_prompts(60, 1500, max_tokens=256))
    stats = machine.stats
    assert stats.preemptions >= 8
    assert stats.swaps == 0
    assert stats.spilled_blocks > 500
    assert len(machine.copies) == stats.spilled_blocks, "nothing of it is asked for again"


@pytest.mark.parametrize(
    ("broken", "losing"), [(Restore, "lost_reads"), (Save, "lost_writes")], ids=["reads", "writes"]
)
def test_auto_gives_up_on_a_host_that_loses_what_it_is_given(
    broken: type[Restore | Save], losing: str
) -> None:
    machine = SteadyMachine(1500, 10.0, fails=lambda copy: isinstance(copy, broken))
    machine.serve(own_prompts(120, 1500, max_tokens=256))
    assert machine.stats.preemptions >= 20
    assert 0 < machine.stats.swaps <= 3
    assert getattr(machine.scheduler.costs, losing).value > 0.4


def test_a_prediction_meets_what_comes_of_it() -> None:
    """On a machine as steady as this one they agree."""
    block_bytes = 1000
    for mode in (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP):
        costs = CostModel(block_bytes, Rates(100.0, written_bytes=2000.0, read_bytes=2000.0))
        replica = Replica(
            12, 4, mode=mode, host_slots=100, costs=costs, copy_s=0.5, token_s=0.01, caching=False
        )
        replica.submit(*own_prompts(4, 8, max_tokens=12))
        ratios = []
        while replica.scheduler.has_work:
            outcome = replica.finish_step(replica.schedule())
            ratios += [cost.predicted_s / cost.actual_s for cost in outcome.resumed]
        assert len(ratios) >= 2
        assert all(0.7 < ratio < 1.4 for ratio in ratios), ratios
        assert {receipt.swaps == receipt.preemptions for receipt in receipts(replica)} == (
            {True} if mode is PreemptionMode.SWAP else {True, False}
        )


def test_a_prediction_reckons_with_what_a_victim_finds_again() -> None:
    """About half of a victim's cached blocks are there still when it comes back."""
    machine = SteadyMachine(1500, 0.05, mode=PreemptionMode.RECOMPUTE, caching=True)
    machine.serve(own_prompts(120, 1500, max_tokens=256))
    ratios = machine.ratios(swapped=False)
    assert len(ratios) >= 20
    assert 0.3 < machine.scheduler.costs.found.value < 0.7
    assert 0.9 < median(ratios) < 1.15
    assert 0.8 < fmean(ratios) < 1.25
