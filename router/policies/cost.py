"""What placing a request on a replica costs, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from router.policies.policy import Candidate, Demand, Terms

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
    that run, and the other way round, and those that run wait for the new prefill. R: probability
    times cost of preemptions.
    """

    phi: float = 4.0
    w: float = 0.25
    """How much a second of slower decoding counts against one of waiting for the first token."""
    stalls: float = 1.0
    """Seconds that a decoding choice waits for a second of prefill beside it: 1 where one step
    computes both, as in our engine; 0 where prefill has a machine of its own."""

    def terms(self, demand: Demand, candidate: Candidate) -> Terms:
        rate, running = candidate.prefill_tokens_per_s, candidate.running
        wait_s = candidate.queued_tokens / rate
        work_s = prefill_s = candidate.uncached_tokens / rate
        if candidate.host_tokens:
            work_s += candidate.host_tokens / candidate.read_tokens_per_s
        later_s = self.phi * work_s
        if demand.hits_per_minute > COLD_HITS_PER_MINUTE:
            later_s /= 1.0 + demand.hits_per_minute - COLD_HITS_PER_MINUTE
        slowed_s = 2 * demand.output_tokens * candidate.decode_choice_s + self.stalls * prefill_s
        decode_s = self.w * slowed_s * running
        preempted_s = preempt_s(demand, candidate)
        return Terms(
            candidate.replica,
            wait_s,
            work_s,
            later_s,
            decode_s,
            preempted_s,
            wait_s + work_s + later_s + decode_s + preempted_s,
            candidate.device_tokens,
            candidate.host_tokens,
        )


def preempt_s(demand: Demand, candidate: Candidate) -> float:
    """Probability of a preemption times what it costs: 0 while there is room."""
    if candidate.filled_tokens <= FILL_SAFE * candidate.kv_tokens or not candidate.kv_tokens:
        return 0.0
    fill = candidate.filled_tokens / candidate.kv_tokens
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
