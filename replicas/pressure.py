"""What a replica has to bear, as the autoscaler asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.protocol import EngineInfo, ReplicaSnapshot

QUEUE_S = "quire_queue_s"
KV_USED = "quire_kv_used"
PREEMPTIONS_PER_S = "quire_preemptions_per_s"
"""Names under which Serve carries the figures."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Of one replica."""

    queue_s: float = 0.0
    """Seconds of prefill that wait there, by its own measured rate."""
    kv_used: float = 0.0
    """Share of the KV pool that requests hold; cached prefixes that may go do not count."""
    preemptions_per_s: float = 0.0

    def as_stats(self) -> dict[str, float]:
        """By name."""
        return {
            QUEUE_S: self.queue_s,
            KV_USED: self.kv_used,
            PREEMPTIONS_PER_S: self.preemptions_per_s,
        }


class PressureGauge:
    """Reads the pressure off successive snapshots."""

    def __init__(self, engine: EngineInfo, now: float) -> None:
        self._num_blocks = engine.num_blocks
        self._preemptions = 0
        self._read_at = now

    def read(self, load: ReplicaSnapshot, now: float) -> Pressure:
        """The pressure now; preemptions are those since the last reading."""
        preemptions, seconds = load.preemptions - self._preemptions, now - self._read_at
        self._preemptions, self._read_at = load.preemptions, now
        rate = load.prefill_tokens_per_s
        return Pressure(
            queue_s=load.queued_tokens / rate if rate > 0 else 0.0,
            kv_used=load.used_blocks / self._num_blocks,
            preemptions_per_s=preemptions / seconds if seconds > 0 else 0.0,
        )
