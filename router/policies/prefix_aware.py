"""The replica where the request waits least, its cached prefix counted."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.policy import Candidate
from router.policies.round_robin import RoundRobin

LATER_COST = 1.0
"""What a token computed again costs the requests behind it, in tokens. Too small and prefixes
are scattered over all replicas; too large and one popular prefix overloads its holder."""


class PrefixAware:
    """Minimises work ahead + own uncached tokens, the latter once more for those who come later.

    All in tokens to compute. Equals take turns: a cold replica is no better than another.
    """

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def rank(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return sorted(self._turns.rank(candidates), key=_cost)


def _cost(candidate: Candidate) -> float:
    return candidate.tokens + (1.0 + LATER_COST) * candidate.uncached_tokens
