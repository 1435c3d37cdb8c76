"""What a victim policy decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from replicas.core.request import Choice


class PreemptionPolicy(Protocol):
    """Chooses one of the choices that may be preempted."""

    def choose(self, candidates: Sequence[Choice]) -> Choice:
        """`candidates` is never empty; the scheduler has applied its own rules to it."""
        ...
