"""The victim is the newest arrival of the lowest class."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.core.request import Choice


class LastAdmitted:
    """Whoever came first keeps its place, so that work done longest is thrown away least."""

    def choose(self, candidates: Sequence[Choice]) -> Choice:
        return max(candidates, key=lambda choice: choice.rank)
