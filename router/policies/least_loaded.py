"""The replica with the least work first."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.policy import Candidate, Demand, Ranking
from router.policies.ties import by_rendezvous


class LeastLoaded:
    """By tokens to prefill, then by choices; equals by rendezvous hash."""

    name = "least_loaded"
    knows_load = True
    knows_prefixes = False

    def rank(self, demand: Demand, candidates: Sequence[Candidate]) -> Ranking:
        loads = {c.replica: (c.queued_tokens, c.in_flight) for c in candidates}
        ranked = sorted(by_rendezvous(demand.key, loads), key=loads.__getitem__)
        tokens, choices = loads[ranked[0]]
        return Ranking(tuple(ranked), f"least work: {tokens} tokens to prefill, {choices} choices")
