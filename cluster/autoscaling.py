"""How many replicas there should be: queueing, KV pressure and preemptions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from replicas.pressure import KV_USED, PREEMPTIONS_PER_S, QUEUE_S, Pressure


@dataclass(frozen=True, slots=True)
class Targets:
    """What a replica may bear on average."""

    queue_s: float
    kv_used: float
    preemptions_per_s: float


def desired_replicas(pressures: Sequence[Pressure], targets: Targets, ongoing: float) -> float:
    """Replicas that would bring the worst of the three down, or up, to its target.

    Proportional: `n * mean / target`, as is usual. Preemptions ask for one replica more at the
    most: a pool that is a little too small preempts as busily as one that is far too small.
    While requests are `ongoing` there is at least one replica.
    """
    count = len(pressures)
    queue = sum(each.queue_s for each in pressures) / targets.queue_s
    memory = sum(each.kv_used for each in pressures) / targets.kv_used
    wanted = max(queue, memory)
    preemptions = sum(each.preemptions_per_s for each in pressures)
    if preemptions > targets.preemptions_per_s * count:
        wanted = max(wanted, count + 1.0)
    return max(wanted, 1.0) if ongoing > 0 else wanted


class Context(Protocol):
    """The part of Serve's AutoscalingContext that counts."""

    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """Metric -> replica -> its mean over the look-back period."""

    @property
    def total_num_requests(self) -> float:
        """Running and queued ones."""


class PressurePolicy:
    """Serve's custom policy; Serve itself applies bounds and delays to what it wants."""

    def __init__(self, queue_s: float, kv_used: float, preemptions_per_s: float) -> None:
        self._targets = Targets(queue_s, kv_used, preemptions_per_s)

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """(replicas, state): what is there stays while no replica has said anything."""
        pressures = _pressures(context.aggregated_metrics or {})
        if not pressures:
            return float(context.target_num_replicas), {}
        return desired_replicas(pressures, self._targets, context.total_num_requests), {}


def _pressures(metrics: Mapping[str, Mapping[Any, float]]) -> list[Pressure]:
    replicas = {replica for values in metrics.values() for replica in values}
    return [
        Pressure(*(metrics.get(name, {}).get(replica, 0.0) for name in _NAMES))
        for replica in replicas
    ]


_NAMES = (QUEUE_S, KV_USED, PREEMPTIONS_PER_S)
