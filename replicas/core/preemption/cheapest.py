"""The victim gives back the most blocks for each second that its return will cost."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.core.preemption.policy import Candidate

_INSTANT_S = 1e-6


class Cheapest:
    """Blocks really released over the cost to restore, with ageing: each preemption doubles a
    choice's price, so that nobody is chosen for ever."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return max(candidates, key=_gain)


def _gain(candidate: Candidate) -> tuple[float, int]:
    choice = candidate.choice
    price = max(candidate.cost_s(), _INSTANT_S) * 2.0 ** min(choice.preemptions, 64)
    return candidate.freed_blocks() / price, choice.epoch
