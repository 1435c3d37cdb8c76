"""The Placer: booking at once, affinity without overload, and what it does without news."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from replicas.core.block_hash import BlockHasher
from replicas.protocol import BlockEvents, ChoiceProgress
from router.expectations import LATE_S
from router.placement import POLICIES
from router.replica_states import STALE_AFTER_S
from tests.router.cluster import HASHER, PREFIX, REPLICAS, Cluster, request
from tests.router.feeds import ENGINE, Feed


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("connect", [True, False])
def test_ranks_every_replica_once(policy: str, connect: bool) -> None:
    placement = Cluster(policy, connect=connect).placement("call", [1, 2, 3])
    assert sorted(placement.ranked) == REPLICAS
    assert placement.policy == policy
    assert placement.stale == (not connect and policy != "round_robin")


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware"])
@pytest.mark.parametrize("connect", [True, False])
def test_requests_placed_at_one_moment_see_each_other(policy: str, connect: bool) -> None:
    it = Cluster(policy, connect=connect)
    counts = Counter(it.place(str(i), [i] * 200) for i in range(30))
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("policy", ["least_loaded", "power_of_two", "prefix_aware"])
def test_reported_work_counts_like_booked_work(policy: str) -> None:
    it = Cluster(policy)
    it.report("r1", queued_tokens=50_000, waiting=50)
    assert "r1" not in {it.place(str(i), [i] * 20) for i in range(20)}


def test_completed_work_counts_no_more() -> None:
    it = Cluster("least_loaded")
    busy = it.place("long", [7] * 5000)
    assert busy not in {it.place(str(i), [i] * 20) for i in range(9)}
    it.placer.completed("long")
    assert busy in {it.place(str(i), [i] * 20) for i in range(10, 13)}


def test_prefix_aware_returns_to_the_holder() -> None:
    it = Cluster()
    holder = it.serve("first", [*PREFIX, 1])
    for i in range(20):
        assert it.serve(str(i), [*PREFIX, 1000 + i]) == holder


def test_a_prefix_counts_before_the_replica_says_that_it_has_it() -> None:
    it = Cluster()
    holder = it.place("first", [*PREFIX, 1])
    found = it.placement("second", [*PREFIX, 2])
    assert found.ranked[0] == holder
    it.placer.completed("first")
    it.placer.completed("second")
    it.now = 1000.0
    for name in REPLICAS:
        it.report(name)
    terms = it.placement("third", [*PREFIX, 3]).terms
    assert [each.device_tokens for each in terms] == [0, 0, 0]


def test_an_evicted_prefix_counts_no_more() -> None:
    it = Cluster()
    holder = it.serve("first", [*PREFIX, 1])
    it.feeds[holder].step(it.now, BlockEvents(removed=tuple(HASHER.chain(PREFIX))))
    terms = it.placement("second", [*PREFIX, 2]).terms
    assert [each.device_tokens for each in terms] == [0, 0, 0]


def test_what_a_neighbours_host_memory_holds_is_better_than_nothing() -> None:
    it = Cluster()
    chain = tuple(HASHER.chain(PREFIX))
    far = Feed(it.placer.states, "far", node="elsewhere").connect()
    it.feeds["r0"].step(0.0, BlockEvents(offloaded=chain))
    it.replicas = ["r0", "r1", "far"]
    placement = it.placement("call", [*PREFIX, 1])
    assert [each.host_tokens for each in placement.terms] == [400, 400, 0]
    assert placement.ranked[-1] == far.replica


def test_a_salt_separates_prefixes() -> None:
    it = Cluster()
    it.serve("a", [*PREFIX, 1], salt="a")
    terms = it.placement("b", [*PREFIX, 1], salt="b").terms
    assert [each.device_tokens for each in terms] == [0, 0, 0]


def test_replicas_of_two_kinds_each_know_their_own_digests() -> None:
    it = Cluster()
    fp8 = {"kv_dtype": "fp8_e4m3", "kv_scales": "digest", "block_size": 32}
    newer = replace(ENGINE, fingerprint="newer", **fp8)
    Feed(it.placer.states, "r2", incarnation="2", engine=newer).connect()
    hasher = BlockHasher(
        fingerprint="newer", kv_dtype="fp8_e4m3", kv_scales="digest", block_size=32
    )
    it.feeds["r0"].step(0.0, BlockEvents(stored=tuple(HASHER.chain(PREFIX[:64]))))
    step = Feed(it.placer.states, "r2", sequence=0).happen(
        BlockEvents(stored=tuple(hasher.chain(PREFIX)))
    )
    assert it.placer.states.apply("r2", step, 0.0)
    placement = it.placement("call", [*PREFIX, 1])
    assert [each.device_tokens for each in placement.terms] == [64, 0, 384]
    assert placement.ranked[0] == "r2"


class TestPopularPrefix:
    """O19: routing by prefix hit alone sends everybody to the one replica that has it."""

    def test_is_spread_when_all_come_at_once(self) -> None:
        it = Cluster()
        counts = Counter(it.place(str(i), [*PREFIX, *([1000 + i] * 30)]) for i in range(60))
        assert all(10 <= counts[replica] <= 30 for replica in REPLICAS), counts

    def test_is_spread_when_one_replica_has_had_it_for_long(self) -> None:
        it = Cluster()
        it.serve("first", [*PREFIX, 1])
        counts = Counter(it.place(str(i), [*PREFIX, *([1000 + i] * 30)]) for i in range(60))
        assert all(10 <= counts[replica] <= 30 for replica in REPLICAS), counts
        assert max(counts.values()) <= 36

    def test_tenants_keep_their_hits(self) -> None:
        it = Cluster()
        prefixes = [[10_000 * (tenant + 1) + i for i in range(400)] for tenant in range(3)]
        hits = tokens = 0
        for i in range(60):
            prompt = [*prefixes[i % 3], *([90_000 + i] * 30)]
            placement = it.placement(str(i), prompt)
            chosen = placement.ranked[0]
            hits += next(t.device_tokens for t in placement.terms if t.replica == chosen)
            tokens += len(prompt)
            it.feeds[chosen].step(it.now, BlockEvents(stored=tuple(HASHER.chain(prompt))))
            if i >= 6:
                it.placer.completed(str(i - 6))
        assert hits / tokens > 0.8

    def test_unique_prompts_avoid_the_replica_in_long_work(self) -> None:
        it = Cluster()
        stuck = it.place("long", [9] * 20_000, max_tokens=1000)
        counts = Counter(it.place(str(i), [i] * 100) for i in range(60))
        assert counts[stuck] == 0

    def test_unique_prompts_avoid_the_replica_with_long_outputs(self) -> None:
        it = Cluster()
        it.report("r1", running=30, expected_tokens=30 * 500)
        counts = Counter(it.place(str(i), [i] * 10) for i in range(12))
        assert counts["r1"] == 0

    def test_a_miss_is_not_sent_to_who_has_the_least(self) -> None:
        """r2 has nothing yet, the others have much; it works on one long prompt."""
        it = Cluster()
        for name in ("r0", "r1"):
            chain = HASHER.chain([ord(name[1]) * 1000 + i for i in range(3200)])
            it.feeds[name].step(0.0, BlockEvents(stored=tuple(chain)), cached_blocks=200)
        it.report("r2", queued_tokens=2000, waiting=1)
        counts = Counter(it.place(str(i), [i] * 100) for i in range(20))
        assert counts["r2"] == 0


def test_a_new_replica_is_no_magnet() -> None:
    it = Cluster()
    for name in REPLICAS:
        it.report(name, queued_tokens=100_000, waiting=10)
    it.place("before", [1] * 100)
    it.feeds["new"] = Feed(it.placer.states, "new").connect()
    it.replicas = [*REPLICAS, "new"]
    placements = [it.placement(str(i), [i] * 100) for i in range(100)]
    counts = Counter(each.ranked[0] for each in placements)
    assert 40 <= counts["new"] <= 52
    assert any("warms up" in each.reason for each in placements)


def test_a_dead_replica_is_forgotten() -> None:
    it = Cluster()
    holder = it.place("first", [*PREFIX, 1])
    it.placer.forget(holder)
    assert it.placer.requests(holder) == 0
    it.replicas = [r for r in REPLICAS if r != holder]
    second = it.serve("second", [*PREFIX, 2])
    assert it.placement("third", [*PREFIX, 3]).ranked[0] == second


def test_a_retried_call_moves_its_booking() -> None:
    it = Cluster("least_loaded")
    first = it.place("call", [1] * 100)
    it.replicas = [r for r in REPLICAS if r != first]
    second = it.place("call", [1] * 100)
    assert (it.placer.requests(first), it.placer.requests(second)) == (0, 1)


def test_a_call_that_went_elsewhere_takes_its_blocks_along() -> None:
    it = Cluster()
    placement = it.placement("call", [*PREFIX, 1])
    other = placement.ranked[1]
    it.placer.routed("call", other, it.now)
    assert it.placer.requests(other) == 1
    terms = {t.replica: t.device_tokens for t in it.placement("next", [*PREFIX, 2]).terms}
    assert terms == {name: 400 if name == other else 0 for name in REPLICAS}


def test_a_call_that_never_arrives_is_not_booked_for_ever() -> None:
    it = Cluster("least_loaded")
    lost = it.place("lost", [1] * 100)
    it.now = 1000.0
    it.replicas = [r for r in REPLICAS if r != lost]
    it.place("other", [1])
    assert it.placer.requests(lost) == 0


def test_without_news_the_least_loaded_by_bookings_is_taken_and_counted() -> None:
    it = Cluster()
    it.place("first", [*PREFIX, 1])
    it.now = STALE_AFTER_S + 1
    placement = it.placement("second", [*PREFIX, 2])
    assert placement.stale
    assert "no replica's state is known" in placement.reason
    assert (it.placer.placements, it.placer.stale_placements) == (2, 1)


def test_one_without_news_gets_its_part_and_no_more() -> None:
    """It has no queue by its feed, because it has no feed."""
    it = Cluster()
    it.placer.states.lose("r1", 0.0)
    counts = Counter(it.place(str(i), [i] * 200) for i in range(30))
    assert max(counts.values()) - min(counts.values()) <= 2


def test_a_request_that_goes_on_elsewhere_counts_what_it_had_produced() -> None:
    it = Cluster()
    asked = replace(request([5] * 100, max_tokens=40), progress=(ChoiceProgress(tuple(range(30))),))
    placement = it.placer.place("call", asked, REPLICAS, 0.0)
    assert placement.terms[0].work_s == pytest.approx(130 / 1000)
    assert it.placer._book.all(placement.ranked[0]).output_tokens == 10


def test_a_placement_explains_itself_in_json() -> None:
    it = Cluster()
    holder = it.serve("first", [*PREFIX, 1])
    told = json.loads(json.dumps(it.placement("second", [*PREFIX, 2]).as_dict()))
    assert told["chosen"] == told["ranked"][0] == holder
    assert [t["replica"] for t in told["terms"]] == REPLICAS
    costs = {t["replica"]: t["cost_s"] for t in told["terms"]}
    assert costs[holder] == min(costs.values())
    assert "least cost" in told["reason"]


def test_nothing_is_left_of_work_that_is_done() -> None:
    it = Cluster()
    for i in range(50):
        it.place(str(i), [i] * 100)
        it.placer.completed(str(i))
    it.now = LATE_S + 10
    for name in REPLICAS:
        it.report(name)
    it.place("last", [1])
    it.placer.completed("last")
    assert len(it.placer.states.index) == 0
    assert sum(it.placer.requests(name) for name in REPLICAS) == 0
