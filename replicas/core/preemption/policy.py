"""What a victim policy decides, and from what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from replicas.core.request import Choice


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice that may be preempted. What few policies ask for is computed when asked for."""

    choice: Choice
    freed_blocks: Callable[[], int]
    """Blocks that nobody else holds: what preempting this choice really gives back."""
    cost_s: Callable[[], float]
    """Predicted seconds until the choice has caught up again."""


class PreemptionPolicy(Protocol):
    """Chooses one of the choices that may be preempted."""

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        """`candidates` is never empty; the scheduler has applied its own rules to it."""
        ...
