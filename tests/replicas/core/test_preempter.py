"""Who gives way under each policy, and whether its KV is kept: by what it costs."""

from __future__ import annotations

import pytest

from replicas.core.block_transfer import EndedCopy
from replicas.core.cost_model import CostModel, Rates
from replicas.core.preemption.cheapest import Cheapest
from replicas.core.preemption.last_admitted import LastAdmitted
from replicas.core.preemption.policy import Candidate, PreemptionPolicy
from replicas.core.preemption.preempter import Preempter, PreemptionMode
from replicas.core.preemption.priority import Priority
from replicas.core.request import Choice, Request
from replicas.core.scheduler import Scheduler, SchedulerConfig
from replicas.core.scheduler_output import SampledToken, StepResult
from replicas.core.updater import StepUpdater
from tests.replicas.core.builders import make_kv, make_request
from tests.replicas.core.harness import Replica
from tests.replicas.core.test_scheduler_preemption import own_prompts, receipts

GIB = 2**30
PREFILL_TOKENS_PER_S = 2000.0
TOKEN_BYTES = 23_040
"""Of KV: 30 layers x (K, V) x 3 heads x 64 x 2 bytes, the embedded model in bfloat16."""
BLOCK = 64


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
    preempter = Preempter(kv, LastAdmitted(), PreemptionMode.RECOMPUTE, CostModel(1))
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
def test_auto_decides_by_what_it_has_measured(gib_per_s: float, context: int, swaps: bool) -> None:
    """It begins with a guess that is wrong by far, and learns from its first copies."""
    block_bytes, guess = BLOCK * TOKEN_BYTES, (0.2 if swaps else 1.0) * GIB
    costs = CostModel(block_bytes, Rates(PREFILL_TOKENS_PER_S, guess, guess))
    kv = make_kv(6 * (context // BLOCK + 1), BLOCK, caching=False, host_slots=10_000)
    config = SchedulerConfig(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=10_000,
        min_progress_tokens=1,
        look_ahead=False,
        watermark=0.0,
        hysteresis=0.0,
    )
    scheduler = Scheduler(config, kv, LastAdmitted(), costs)
    updater = StepUpdater(scheduler, ())
    for request in own_prompts(220, context, max_tokens=256):
        scheduler.add(request, 0.0)
    while scheduler.has_work:
        output = scheduler.schedule(0.0)
        drawn = {draw.key: SampledToken(1) for item in output.scheduled for draw in item.draws}
        seconds = output.num_tokens / PREFILL_TOKENS_PER_S
        updater.update(output, StepResult(drawn, {}, seconds), 0.0)
        copy_s = block_bytes / (gib_per_s * GIB)
        scheduler.end_copies([EndedCopy(c, True, copy_s) for c in output.host_copies], 0.0)
    stats = scheduler.stats
    assert stats.preemptions >= 20
    share = stats.swaps / stats.preemptions
    assert share >= 0.9 if swaps else share <= 0.1


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
