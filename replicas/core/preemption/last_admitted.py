"""The victim is whoever was admitted last."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.core.preemption.policy import Candidate


class LastAdmitted:
    """Whoever has run longest keeps running, so that the least work is thrown away."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return max(candidates, key=lambda candidate: candidate.choice.epoch)
