"""What an operator sees of preemption and of the host tier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

from replicas.core.scheduler_output import ResumeCost
from replicas.core.scheduler_stats import SchedulerStats
from replicas.metric_families import MetricFamilies
from replicas.protocol import EngineInfo, ReplicaSnapshot

_RECOMPUTE, _SWAP = "recompute", "swap"

_STALL_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0),
    *(100.0, 250.0),
)
_COST_RATIO = (
    *(0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0),
    *(1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0),
)
"""As fine on either side: a cost foreseen too low is as bad as one foreseen too high."""


class PreemptionMetrics:
    """Observes what preemptions cost; the rest it reads off the scheduler's counters."""

    def __init__(self, families: MetricFamilies, info: EngineInfo) -> None:
        self._families = families
        self._host_blocks = info.host_blocks
        self._stall = families.histogram(
            "quire:preemption_stall_seconds",
            "From a preemption until its choice could compute anew, or gave up waiting",
            _STALL_S,
        )
        self._cost_ratio = families.histograms(
            "quire:preemption_cost_ratio",
            "Predicted over measured seconds until a preempted choice had caught up",
            _COST_RATIO,
            "mode",
            (_RECOMPUTE, _SWAP),
        )

    def observe(self, resumed: Iterable[ResumeCost]) -> None:
        """Take in preemptions that are over. Of one that did not run its course the cost is not
        what was predicted."""
        for cost in resumed:
            self._stall.observe(cost.stall_s)
            if cost.caught_up and cost.actual_s > 0:
                mode = _SWAP if cost.swapped else _RECOMPUTE
                self._cost_ratio[mode].observe(cost.predicted_s / cost.actual_s)

    def collect(self, snapshot: ReplicaSnapshot, stats: SchedulerStats) -> Iterator[Metric]:
        """All but the histograms, which are with their MetricFamilies."""
        yield from self._gauges(snapshot)
        yield from self._counters(stats)
        yield self._families.counters(
            "quire:preemptions",
            "Preempted choices: their KV thrown away, or kept in the host tier",
            "mode",
            {_RECOMPUTE: stats.preemptions - stats.swaps, _SWAP: stats.swaps},
        )

    def _gauges(self, snapshot: ReplicaSnapshot) -> Iterator[Metric]:
        usage = snapshot.host_blocks / self._host_blocks if self._host_blocks else 0.0
        for name, text, value in (
            ("host_tier_usage_perc", "Used share of the host tier, 0-1; 0 without one", usage),
            ("host_tier_blocks", "Blocks in the host tier", snapshot.host_blocks),
            (
                "host_tier_pinned_blocks",
                "Of the host tier's blocks, those that preempted choices wait to get back",
                snapshot.pinned_host_blocks,
            ),
            (
                "empty_slots",
                "Token slots of used blocks that hold no token: fragmentation",
                snapshot.empty_slots,
            ),
            ("copies_in_flight", "Block copies between device and host", snapshot.copies),
        ):
            yield self._families.gauge(f"quire:{name}", text, value)

    def _counters(self, stats: SchedulerStats) -> Iterator[Metric]:
        for name, text, value in (
            (
                "quire:computed_tokens",
                "Tokens computed; useful are those that quire:recomputed_tokens does not count",
                stats.computed_tokens,
            ),
            (
                "quire:recomputed_tokens",
                "Of quire:computed_tokens, those computed again after a preemption",
                stats.recomputed_tokens,
            ),
            (
                "quire:restored_tokens",
                "Tokens whose KV came back from the host tier after a preemption",
                stats.restored_tokens,
            ),
            ("quire:host_written_bytes", "Bytes of KV to the host tier", stats.written_bytes),
            ("quire:host_read_bytes", "Bytes of KV from the host tier", stats.read_bytes),
            (
                "quire:spilled_blocks",
                "Cached prefix blocks written to the host tier before their eviction",
                stats.spilled_blocks,
            ),
            (
                "quire:failed_copies",
                "Copies to or from the host tier that failed, came late or found another content",
                stats.failed_copies,
            ),
            (
                "vllm:external_prefix_cache_queries",
                "Prompt tokens looked up in the host tier: not found on the device",
                stats.host_cache_queries,
            ),
            (
                "vllm:external_prefix_cache_hits",
                "Prompt tokens found in the host tier",
                stats.host_cache_hits,
            ),
        ):
            yield self._families.counter(name, text, value)
