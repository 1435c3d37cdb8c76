"""What a Placer keeps of calls: those that it declines, that come back, that end elsewhere; and of
replicas that have gone."""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from replicas.protocol import BlockEvents
from router.expectations import LATE_S
from router.placement import Placement
from router.replica_states import ORPHAN_S
from tests.router.cluster import HASHER, PREFIX, REPLICAS, Cluster, request
from tests.router.feeds import Feed


class TestAskingToMove:
    """A request that waits on one replica asks again and again whether another is quick enough."""

    def ask(self, it: Cluster, call: str, within_s: float) -> Placement:
        it.now += 1.0
        for name in REPLICAS:
            it.report(name)
        asked = request([*PREFIX, 1])
        return it.placer.place(call, asked, ["r1", "r2"], it.now, within_s)

    def test_makes_nothing_hot_or_warm_when_it_is_declined(self) -> None:
        it = Cluster()
        it.feeds["r0"].step(0.0, BlockEvents(offloaded=tuple(HASHER.chain(PREFIX[:200]))))
        it.place("before", [7] * 20)
        it.placer.completed("before")
        it.replicas = REPLICAS[:2]
        asked = [self.ask(it, f"call/{i}", 1e-9) for i in range(60)]
        assert all(each.declined for each in asked)
        assert asked[-1].cost_s == pytest.approx(asked[0].cost_s)
        assert asked[0].terms[0].host_tokens > 0
        assert it.placer.placements == 1
        assert sum(it.placer.requests(name) for name in REPLICAS) == 0

    def test_is_no_share_of_a_new_replica(self) -> None:
        it, asked = Cluster(), request([*PREFIX, 1])
        it.feeds["r3"] = Feed(it.placer.states, "r3").connect()
        old = ["r0", "r1", "r3"]
        it.placer.place("before", asked, old, 0.0)
        for name in old:
            it.report(name, queued_tokens=10_000)
        tried = [it.placer.place(f"{i}", asked, [*old, "r2"], 0.0, 1e-9) for i in range(9)]
        assert all(each.declined for each in tried)
        assert {each.ranked[0] for each in tried} == {"r2"}, "it is never held back"

    def test_books_where_it_is_accepted(self) -> None:
        it = Cluster()
        placement = self.ask(it, "call", 1000.0)
        assert not placement.declined
        assert it.placer.requests(placement.ranked[0]) == 1

    def test_without_costs_nobody_is_quick_enough(self) -> None:
        assert self.ask(Cluster("least_loaded"), "call", 1000.0).declined


def test_a_call_that_comes_back_counts_once() -> None:
    """Serve asks again, ever more rarely, while nobody has room."""
    it = Cluster()
    holder = it.serve("first", [*PREFIX, 1])
    hot = it.placer._hot
    placements = [it.placement("waits", [*PREFIX, 2]) for _ in range(20)]
    assert [each.again for each in placements] == [False] + [True] * 19
    assert hot.per_minute(HASHER.chain(PREFIX)[-1], 0.0) == 1
    assert (it.placer.placements, it.placer.requests(holder)) == (2, 1)


def test_blocks_that_do_not_come_in_time_count_no_more() -> None:
    """Without the end of their call, which may take long."""
    it = Cluster()
    holder = it.place("long", [*PREFIX, 1])
    it.placer.routed("long", holder, 0.0)
    it.now = LATE_S + 10
    for name in REPLICAS:
        it.report(name)
    terms = it.placement("next", [*PREFIX, 2]).terms
    assert [each.device_tokens for each in terms] == [0, 0, 0]


def test_host_memory_of_the_dead_is_forgotten_in_time() -> None:
    it = Cluster()
    it.feeds["r0"].step(0.0, BlockEvents(offloaded=tuple(HASHER.chain(PREFIX))))
    it.placer.forget("r0")
    it.replicas = REPLICAS[1:]
    assert [each.host_tokens for each in it.placement("a", [*PREFIX, 1]).terms] == [400, 400]
    it.placer.completed("a")
    it.now = ORPHAN_S
    for name in it.replicas:
        it.report(name)
    assert [each.host_tokens for each in it.placement("b", [*PREFIX, 2]).terms] == [0, 0]


def test_one_that_was_forgotten_and_comes_back_warms_up() -> None:
    it = Cluster("least_loaded")
    it.place("before", [1] * 100)
    it.placer.forget("r2")
    Feed(it.placer.states, "r2", incarnation="2").connect()
    for name in ("r0", "r1"):
        it.report(name, queued_tokens=100_000, waiting=10)
    counts = Counter(it.place(str(i), [i] * 100) for i in range(90))
    assert 60 <= counts["r2"] <= 62


def test_a_call_that_ends_early_leaves_the_blocks_that_the_next_one_computes() -> None:
    it = Cluster()
    home = it.place("first", [*PREFIX, 1])
    assert it.place("second", [*PREFIX, 2]) == home
    for call in ("first", "second"):
        it.placer.routed(call, home, it.now)
    it.placer.completed("first", home)
    third = it.placement("third", [*PREFIX, 3])
    assert {t.replica: t.device_tokens for t in third.terms}[home] == 400
    it.placer.completed("third")
    it.placer.completed("second", home)
    fourth = it.placement("fourth", [*PREFIX, 4])
    assert [each.device_tokens for each in fourth.terms] == [0, 0, 0]


@pytest.mark.parametrize("connect", [True, False])
def test_nothing_grows_with_the_calls_that_were_served(connect: bool) -> None:
    """One stream lasts all the time; replicas without feeds tell nothing that would settle it."""
    it = Cluster(connect=connect)

    def serve(calls: range) -> int:
        for number in calls:
            it.now = number * 0.1
            chosen = it.place(str(number), [number] * 40)
            it.placer.routed(str(number), chosen, it.now)
            if connect:
                it.report(chosen, running=number % 2)
            it.placer.completed(str(number), chosen)
        gc.collect()
        return len(gc.get_objects())

    it.placer.routed("stream", it.place("stream", [1] * 40), 0.0)
    before = serve(range(1, 700))
    assert serve(range(700, 1200)) - before < 100
