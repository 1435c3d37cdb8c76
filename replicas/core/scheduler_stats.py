"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from replicas.protocol import FinishReason


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start; they only grow."""

    preemptions: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up when their request was first admitted."""
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    """Of requests that produced a first token."""
    generation_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    """Of the computed ones, those that had been computed before a preemption."""
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
