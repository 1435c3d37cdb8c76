"""The better of two replicas drawn at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from router.policies.policy import Candidate, Demand, Ranking


class PowerOfTwo:
    """Draws two and prefers the one with fewer choices, as Ray Serve does by default."""

    name = "power_of_two"
    knows_load = True
    knows_prefixes = False

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def rank(self, demand: Demand, candidates: Sequence[Candidate]) -> Ranking:
        drawn = self._rng.sample(candidates, len(candidates))
        pair = sorted(drawn[:2], key=lambda c: c.in_flight)
        order = tuple(c.replica for c in [*pair, *drawn[2:]])
        return Ranking(order, f"fewer choices of two: {pair[0].in_flight}")
