"""Every replica in turn."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.policy import Candidate, Demand, Ranking


class RoundRobin:
    """Ignores load and prefixes: the baseline."""

    name = "round_robin"
    knows_load = False
    knows_prefixes = False

    def __init__(self) -> None:
        self._next = 0

    def rank(self, demand: Demand, candidates: Sequence[Candidate]) -> Ranking:
        start = self._next % len(candidates)
        self._next += 1
        turn = [*candidates[start:], *candidates[:start]]
        return Ranking(tuple(c.replica for c in turn), "it is its turn")
