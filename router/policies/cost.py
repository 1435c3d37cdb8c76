"""What placing a request on a replica costs, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from router.policies.policy import Candidate, Demand, Terms

HALF_SPEED_BATCH = 64
"""Choices at which a decode step takes twice as long as with none: what one more adds to a step
is taken to be step / (64 + running)."""
COLD_HITS_PER_MINUTE = 4.0
"""A prefix asked for less often than that is not worth a copy elsewhere."""
FILL_SAFE = 0.9
FILL_SURE = 1.1
"""Expected KV over KV there is: below the first nobody is preempted, above the second somebody
is, and the forecast grows evenly in between."""


@dataclass(frozen=True, slots=True)
class CostRule:
    """cost = W + M + phi M / (1 + h) + D + R, as design and measurement found it.

    W: tokens queued for prefill over the measured rate. M: the request's own uncached tokens
    over that rate, and what it reads from host memory. phi M / (1 + h): later requests wait for
    that work as well and find less room in the cache, the less so the hotter the prefix is (h:
    hits a minute above a threshold), as a copy of it soon pays. D: the new choices slow those
    that run, and the other way round. R: probability times cost of preemptions.
    """

    phi: float = 4.0
    w: float = 0.25
    """How much a second of slower decoding counts against one of waiting for the first token."""

    def terms(self, demand: Demand, candidate: Candidate) -> Terms:
        work_s = (
            candidate.uncached_tokens / candidate.prefill_tokens_per_s
            + candidate.host_tokens / candidate.read_tokens_per_s
        )
        hotness = max(0.0, demand.hits_per_minute - COLD_HITS_PER_MINUTE)
        slower_s = candidate.decode_step_s / (HALF_SPEED_BATCH + candidate.running)
        return Terms(
            candidate.replica,
            candidate.queued_tokens / candidate.prefill_tokens_per_s,
            work_s,
            self.phi * work_s / (1.0 + hotness),
            self.w * demand.output_tokens * slower_s * 2 * candidate.running,
            preempt_s(demand, candidate),
            candidate.device_tokens,
            candidate.host_tokens,
        )


def preempt_s(demand: Demand, candidate: Candidate) -> float:
    """Probability of a preemption times what it costs: 0 while there is room."""
    fill = candidate.filled_tokens / candidate.kv_tokens if candidate.kv_tokens else 0.0
    if fill <= FILL_SAFE:
        return 0.0
    forecast = min(1.0, (fill - FILL_SAFE) / (FILL_SURE - FILL_SAFE))
    life_s = demand.output_tokens * candidate.decode_step_s
    measured = min(1.0, candidate.preemptions_per_s * life_s / max(1, candidate.running))
    return (forecast + measured) / 2 * _preemption_cost_s(demand, candidate, life_s)


def _preemption_cost_s(demand: Demand, candidate: Candidate, life_s: float) -> float:
    """Half-way through its output a choice is stopped, and waits until half of another one's
    is done. The replica takes the cheaper way of getting the KV back."""
    tokens = demand.tokens + demand.output_tokens / 2
    again_s = tokens / candidate.prefill_tokens_per_s
    if candidate.written_tokens_per_s > 0:
        swap_s = tokens / candidate.written_tokens_per_s + tokens / candidate.read_tokens_per_s
        again_s = min(again_s, swap_s)
    return again_s + life_s / 2
