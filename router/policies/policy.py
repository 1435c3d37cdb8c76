"""What a placement policy sees and decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as the policy sees it for one request."""

    replica: str
    requests: int
    """Requests in work there, sent by this router."""
    tokens: int
    """Tokens of work booked there."""
    uncached_tokens: int
    """Prompt tokens of this request that the replica would have to compute."""


class PlacementPolicy(Protocol):
    """Orders replicas for one request."""

    def rank(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """All candidates, the best first; `candidates` is never empty."""
        ...
