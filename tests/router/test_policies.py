"""Each policy's rule on candidates made by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router.placement import POLICIES
from router.policies.cost import CostRule, preempt_s
from router.policies.least_loaded import LeastLoaded
from router.policies.policy import Candidate, Demand, PlacementPolicy
from router.policies.power_of_two import PowerOfTwo
from router.policies.prefix_aware import PrefixAware
from router.policies.round_robin import RoundRobin
from router.policies.ties import by_rendezvous

DEMAND = Demand(tokens=1000, output_tokens=100, hits_per_minute=0.0, key=b"key")


def candidate(replica: str = "r", **facts: object) -> Candidate:
    known: dict[str, object] = {
        "uncached_tokens": 1000,
        "prefill_tokens_per_s": 1000.0,
        "read_tokens_per_s": 10_000.0,
        "decode_step_s": 0.02,
        "decode_choice_s": 0.0002,
        "kv_tokens": 100_000,
    }
    return Candidate(replica, **{**known, **facts})  # type: ignore[arg-type]


def cost(demand: Demand = DEMAND, **facts: object) -> float:
    return CostRule().terms(demand, candidate(**facts)).cost_s


def best(policy: PlacementPolicy, *candidates: Candidate, demand: Demand = DEMAND) -> str:
    return policy.rank(demand, candidates).ranked[0]


@pytest.mark.parametrize("name", POLICIES)
def test_ranks_every_candidate_once(name: str) -> None:
    policy = POLICIES[name]()
    names = [f"r{i}" for i in range(5)]
    ranking = policy.rank(DEMAND, [candidate(each) for each in names])
    assert sorted(ranking.ranked) == names
    assert ranking.reason
    assert policy.name == name


def test_round_robin_takes_turns() -> None:
    policy, three = RoundRobin(), [candidate(each) for each in "abc"]
    assert [best(policy, *three) for _ in range(6)] == [*"abcabc"]


def test_least_loaded_counts_tokens_then_choices() -> None:
    policy = LeastLoaded()
    a = candidate("a", queued_tokens=10, in_flight=1)
    b = candidate("b", queued_tokens=5, in_flight=9)
    assert best(policy, a, b) == "b"
    assert best(policy, a, b, candidate("c", queued_tokens=5, in_flight=8)) == "c"


def test_least_loaded_spreads_equals() -> None:
    policy, three = LeastLoaded(), [candidate(each) for each in "abc"]
    keys = [DEMAND._replace(key=str(i).encode()) for i in range(300)]
    counts = Counter(best(policy, *three, demand=demand) for demand in keys)
    assert min(counts.values()) > 70


def test_power_of_two_never_takes_the_worst_and_is_reproducible() -> None:
    replicas = [candidate(each, in_flight=i) for i, each in enumerate("abcd")]
    first, second = PowerOfTwo(random.Random(7)), PowerOfTwo(random.Random(7))
    chosen = [best(first, *replicas) for _ in range(400)]
    assert chosen == [best(second, *replicas) for _ in range(400)]
    counts = Counter(chosen)
    assert counts["d"] == 0
    assert counts["a"] / 400 == pytest.approx(1 / 2, abs=0.08)
    assert counts["c"] / 400 == pytest.approx(1 / 6, abs=0.08)


def test_the_terms_are_those_of_the_rule() -> None:
    terms = CostRule(phi=4, w=0.25, stalls=0.5).terms(
        DEMAND._replace(hits_per_minute=5.0),
        candidate(
            queued_tokens=500, uncached_tokens=600, host_tokens=300, device_tokens=100, running=36
        ),
    )
    assert terms.wait_s == pytest.approx(0.5)
    assert terms.work_s == pytest.approx(0.6 + 0.03)
    assert terms.later_s == pytest.approx(4 * 0.63 / 2)
    slower_s, stalled_s = 100 * (0.02 / 100) * 2 * 36, 0.5 * 0.6 * 36
    assert terms.decode_s == pytest.approx(0.25 * (slower_s + stalled_s))
    assert terms.preempt_s == 0
    assert terms.cost_s == pytest.approx(sum(terms[1:6]))


@pytest.mark.parametrize(
    ("cheaper", "dearer"),
    [
        ({"queued_tokens": 10}, {"queued_tokens": 20}),
        ({"uncached_tokens": 500, "device_tokens": 500}, {}),
        (
            {"uncached_tokens": 500, "device_tokens": 500},
            {"uncached_tokens": 500, "host_tokens": 500},
        ),
        ({"uncached_tokens": 500, "host_tokens": 500}, {}),
        ({"running": 3}, {"running": 4}),
        ({"filled_tokens": 90_000}, {"filled_tokens": 95_000}),
        ({"filled_tokens": 95_000}, {"filled_tokens": 120_000}),
    ],
)
def test_costs_less(cheaper: dict[str, object], dearer: dict[str, object]) -> None:
    assert cost(**cheaper) < cost(**dearer)


def test_a_hot_prefix_is_cheap_to_copy() -> None:
    cold, hot = DEMAND, DEMAND._replace(hits_per_minute=100.0)
    holder = candidate("holder", uncached_tokens=10, device_tokens=990, queued_tokens=2000)
    other = candidate("other")
    assert best(PrefixAware(), holder, other, demand=cold) == "holder"
    assert best(PrefixAware(), holder, other, demand=hot) == "other"


def test_a_prefill_keeps_away_from_many_decodes_unless_they_do_not_wait_for_it() -> None:
    """Even a hot prefix, whose copy costs those to come nothing: those that run pay for it."""
    hot = DEMAND._replace(hits_per_minute=1000.0, output_tokens=0)
    busy = candidate("busy", running=40)
    holder = candidate(
        "holder", uncached_tokens=10, device_tokens=990, running=40, queued_tokens=5000
    )
    assert best(PrefixAware(), holder, busy, demand=hot) == "holder"
    assert best(PrefixAware(CostRule(stalls=0.0)), holder, busy, demand=hot) == "busy"


def test_being_empty_is_no_merit() -> None:
    """A miss goes to the shorter queue, whoever has the smaller cache."""
    full = candidate("full", filled_tokens=60_000)
    empty = candidate("empty", queued_tokens=600)
    assert best(PrefixAware(), full, empty) == "full"


def test_near_equals_share_the_requests() -> None:
    fast = candidate("fast", prefill_tokens_per_s=1010.0)
    slow = candidate("slow", prefill_tokens_per_s=1000.0)
    keys = [DEMAND._replace(key=str(i).encode()) for i in range(200)]
    counts = Counter(best(PrefixAware(), fast, slow, demand=demand) for demand in keys)
    assert min(counts.values()) > 60


def test_preemption_is_forecast_and_believed_more_once_it_was_seen() -> None:
    roomy = candidate(filled_tokens=90_000)
    tight = candidate(filled_tokens=100_000, running=10)
    assert preempt_s(DEMAND, roomy) == 0
    seen = tight._replace(preemptions_per_s=3.0)
    assert 0 < preempt_s(DEMAND, tight) < preempt_s(DEMAND, seen)
    assert preempt_s(DEMAND, roomy._replace(preemptions_per_s=3.0)) == 0


def test_a_fast_host_tier_makes_preemption_cheaper() -> None:
    tight = candidate(filled_tokens=120_000)
    swapping = tight._replace(written_tokens_per_s=100_000.0, read_tokens_per_s=100_000.0)
    assert preempt_s(DEMAND, swapping) < preempt_s(DEMAND, tight)


def test_rendezvous_moves_only_what_the_lost_replica_had() -> None:
    names = [f"r{i}" for i in range(8)]
    keys = [str(i).encode() for i in range(500)]
    before = {key: by_rendezvous(key, names)[0] for key in keys}
    after = {key: by_rendezvous(key, names[:-1])[0] for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != "r7")
    assert 30 < sum(before[key] == "r7" for key in keys) < 100
