"""What a scheduler's queues, blocks and measured rates are between two steps."""

from __future__ import annotations

from replicas.core.request import Choice
from replicas.core.scheduler import Scheduler
from replicas.protocol import ReplicaSnapshot


def take(scheduler: Scheduler) -> ReplicaSnapshot:
    """The state that a replica publishes."""
    kv, costs, running = scheduler.kv, scheduler.costs, scheduler.running
    tier = None if kv.offloader is None else kv.offloader.tier
    return ReplicaSnapshot(
        running=len(running),
        waiting=len(scheduler.waiting),
        used_blocks=kv.pool.num_used,
        cached_blocks=kv.pool.num_cached,
        pending_tokens=sum(c.num_remaining_tokens for c in (*scheduler.waiting, *running)),
        empty_slots=kv.empty_slots(running),
        host_blocks=tier.num_used if tier else 0,
        pinned_host_blocks=tier.num_pinned if tier else 0,
        copies=scheduler.num_copies,
        queued_tokens=_queued_tokens(scheduler),
        expected_tokens=round(scheduler.admission.expected_tokens(running)),
        preemptions=scheduler.stats.preemptions,
        prefill_tokens_per_s=costs.prefill.per_second,
        written_bytes_per_s=costs.write.per_second,
        read_bytes_per_s=costs.read.per_second,
        decode_step_s=costs.decode.seconds,
        decode_choice_s=costs.decode.per_choice,
    )


def _queued_tokens(scheduler: Scheduler) -> int:
    kv = scheduler.kv
    prefilling = sum(_to_prefill(choice, kv.block_size) for choice in scheduler.running)
    return prefilling + sum(kv.uncached_tokens(choice) for choice in scheduler.waiting)


def _to_prefill(choice: Choice, block_size: int) -> int:
    if choice.num_remaining_tokens == 1 and choice.output_token_ids:
        return 0  # it decodes
    return choice.num_remaining_tokens - len(choice.arriving) * block_size
