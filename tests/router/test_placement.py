"""Placement: each policy's rule, booking at once, affinity without overload."""

from __future__ import annotations

from collections import Counter

import pytest

from replicas.core.sampling_params import SamplingParams
from replicas.protocol import GenerateRequest
from router.placement import POLICIES, Placer

REPLICAS = ["r0", "r1", "r2"]


def request(tokens: list[int], *, max_tokens: int = 40, salt: str = "") -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return GenerateRequest("id", tuple(tokens), sampling, cache_salt=salt)


def placer(policy: str) -> Placer:
    return Placer(POLICIES[policy](), block_size=16)


def place(it: Placer, name: str, tokens: list[int], **extra: object) -> str:
    return it.place(name, request(tokens, **extra), REPLICAS, now=0.0)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_every_replica_once(policy: str) -> None:
    order = placer(policy).place("call", request([1, 2, 3]), REPLICAS, now=0.0)
    assert sorted(order) == REPLICAS


def test_round_robin_takes_turns() -> None:
    it = placer("round_robin")
    chosen = [place(it, str(i), [i] * 20) for i in range(6)]
    assert chosen == REPLICAS * 2


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware"])
def test_requests_placed_at_one_moment_see_each_other(policy: str) -> None:
    it = placer(policy)
    counts = Counter(place(it, str(i), [i] * 200) for i in range(30))
    assert set(counts.values()) == {10}


def test_least_loaded_avoids_the_long_prompt() -> None:
    it = placer("least_loaded")
    busy = place(it, "long", [7] * 5000)
    assert busy not in {place(it, str(i), [i] * 20) for i in range(10)}


def test_completed_work_counts_no_more() -> None:
    it = placer("least_loaded")
    busy = place(it, "long", [7] * 5000)
    it.completed("long")
    assert busy in {place(it, str(i), [i] * 20) for i in range(3)}


def test_prefix_aware_returns_to_the_holder() -> None:
    it = placer("prefix_aware")
    prefix = list(range(400))
    holder = place(it, "first", [*prefix, 1])
    it.completed("first")
    for i in range(20):
        assert place(it, str(i), [*prefix, 1000 + i]) == holder
        it.completed(str(i))


def test_a_salt_separates_prefixes() -> None:
    it = placer("prefix_aware")
    prefix = list(range(400))
    place(it, "a", [*prefix, 1], salt="a")
    it.completed("a")
    chosen = set()
    for i in range(3):
        chosen.add(place(it, str(i), [*prefix, 1], salt=f"other {i}"))
        it.completed(str(i))
    assert chosen == set(REPLICAS)


def test_one_popular_prefix_does_not_pile_up_on_its_holder() -> None:
    """Routing by prefix hit alone sends all of them to one replica."""
    it, prefix = placer("prefix_aware"), list(range(400))
    counts = Counter(place(it, str(i), [*prefix, *([1000 + i] * 30)]) for i in range(60))
    assert max(counts.values()) <= 36
    assert min(counts.values()) >= 10


def test_cold_misses_avoid_the_replica_in_long_work() -> None:
    it = placer("prefix_aware")
    stuck = place(it, "long", [9] * 20_000, max_tokens=1000)
    counts = Counter(place(it, str(i), [i] * 100) for i in range(30))
    assert counts[stuck] == 0


def test_a_dead_replica_is_forgotten() -> None:
    it, prefix = placer("prefix_aware"), list(range(400))
    holder = place(it, "first", [*prefix, 1])
    it.forget(holder)
    assert it.requests(holder) == 0
    other = it.place("second", request([*prefix, 2]), [r for r in REPLICAS if r != holder], 0.0)[0]
    it.completed("second")
    assert it.place("third", request([*prefix, 3]), [holder, other], 0.0) == [other, holder]


def test_a_retried_call_moves_its_booking() -> None:
    it = placer("least_loaded")
    first = place(it, "call", [1] * 100)
    second = it.place("call", request([1] * 100), [r for r in REPLICAS if r != first], now=1.0)[0]
    assert (it.requests(first), it.requests(second)) == (0, 1)


def test_a_call_that_never_arrives_is_not_booked_for_ever() -> None:
    it = placer("least_loaded")
    lost = place(it, "lost", [1] * 100)
    it.place("other", request([1]), [r for r in REPLICAS if r != lost], now=1000.0)
    assert it.requests(lost) == 0
