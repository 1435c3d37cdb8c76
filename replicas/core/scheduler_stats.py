"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from replicas.protocol import FinishReason


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start; they only grow."""

    preemptions: int = 0
    """By recompute and by swap."""
    swaps: int = 0
    """Those of the preemptions that kept the KV in the host tier."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up when their request was first admitted."""
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    """Of requests that produced a first token."""
    generation_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    """Of the computed ones, those that had been computed before a preemption."""
    restored_tokens: int = 0
    """Tokens whose KV came back from the host tier after a preemption."""
    host_cache_queries: int = 0
    """Prompt tokens looked up in the host tier at the first admission: not found on the device."""
    host_cache_hits: int = 0
    written_bytes: int = 0
    """To the host tier, by preemptions and by spilled prefixes."""
    read_bytes: int = 0
    """From the host tier."""
    spilled_blocks: int = 0
    """Cached prefix blocks written to the host tier before their eviction."""
    failed_copies: int = 0
    """Copies to or from the host tier that failed, came late or found another content."""
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
