"""Every replica in turn."""

from __future__ import annotations

from collections.abc import Sequence

from router.policies.policy import Candidate


class RoundRobin:
    """Ignores load and prefixes: the baseline."""

    def __init__(self) -> None:
        self._next = 0

    def rank(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        start = self._next % len(candidates)
        self._next += 1
        return [*candidates[start:], *candidates[:start]]
