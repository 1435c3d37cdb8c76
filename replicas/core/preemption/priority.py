"""The victim is the last admitted of the lowest class."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.core.preemption.policy import Candidate


class Priority:
    """A class gives way only when nobody of a lower one is left."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return max(candidates, key=_urgency)


def _urgency(candidate: Candidate) -> tuple[int, int]:
    choice = candidate.choice
    return choice.rank[0], choice.epoch
