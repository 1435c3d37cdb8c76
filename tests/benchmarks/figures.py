"""What was seen of each request, and the figures that follow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, slots=True)
class Served:
    """One request; times are seconds on one clock."""

    sent: float
    first: float
    """When its first token was there."""
    last: float
    """When its last token was there."""
    tokens: int
    """Tokens generated."""

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def tpot(self) -> float:
        """Seconds a token after the first."""
        return (self.last - self.first) / max(1, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Figures:
    """One workload on one system."""

    tok_s: float
    """Generated tokens a second, from the first request's start to the last one's end."""
    ms_per_token: float
    """Median over the requests of the time a token takes after the first."""
    ttft_p50_ms: float
    ttft_p99_ms: float

    @classmethod
    def of(cls, served: Sequence[Served]) -> Self:
        wall = max(s.last for s in served) - min(s.sent for s in served)
        ttft = [s.ttft for s in served]
        return cls(
            tok_s=sum(s.tokens for s in served) / wall,
            ms_per_token=statistics.median(s.tpot for s in served) * 1e3,
            ttft_p50_ms=percentile(ttft, 50) * 1e3,
            ttft_p99_ms=percentile(ttft, 99) * 1e3,
        )

    @classmethod
    def median(cls, repeats: Sequence[Self]) -> Self:
        """Each figure's median over repeats."""
        return cls(
            **{
                field.name: statistics.median(getattr(figures, field.name) for figures in repeats)
                for field in fields(cls)
            }
        )


def percentile(values: Sequence[float], rank: int) -> float:
    """By nearest rank."""
    return sorted(values)[max(0, math.ceil(len(values) * rank / 100) - 1)]
