"""The replica with the least work first."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.policy import Candidate
from router.policies.round_robin import RoundRobin


class LeastLoaded:
    """By booked tokens, then by requests; equals take turns."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def rank(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted(self._turns.rank(candidates), key=lambda c: (c.tokens, c.requests))
