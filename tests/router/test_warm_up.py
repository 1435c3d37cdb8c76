"""A replica that came later than the others gets about two fair shares for a while."""

from __future__ import annotations

from router.warm_up import WARM_UP_S, WarmUp

OLD = ["a", "b", "c"]
ALL = [*OLD, "new"]


def preferring(it: WarmUp, favourite: str, replicas: list[str], times: int, now: float) -> int:
    """How often `favourite` is taken if it is taken whenever it may be."""
    taken = 0
    for _ in range(times):
        it.see(replicas, now)
        chosen = replicas[0] if favourite in it.held_back(replicas, now) else favourite
        it.took(chosen, replicas)
        taken += chosen == favourite
    return taken


def test_those_there_at_first_are_not_held_back() -> None:
    assert preferring(WarmUp(), "c", OLD, 100, now=0.0) == 100


def test_a_new_one_takes_two_fair_shares_at_the_most() -> None:
    it = WarmUp()
    it.see(OLD, 0.0)
    assert 50 <= preferring(it, "new", ALL, 100, now=1.0) <= 52


def test_after_a_while_it_is_like_the_others() -> None:
    it = WarmUp()
    it.see(OLD, 0.0)
    it.see(ALL, 0.0)
    assert preferring(it, "new", ALL, 100, now=WARM_UP_S + 1) == 100


def test_one_that_went_and_came_back_is_new() -> None:
    it = WarmUp()
    it.see(OLD, 0.0)
    it.forget("c")
    assert preferring(it, "c", OLD, 90, now=1.0) <= 62
