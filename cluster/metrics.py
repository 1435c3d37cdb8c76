"""One /metrics for the cluster: families of all replicas and the ingress, merged by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cluster.failover import Hops


class _Merged(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._by_name: dict[str, Metric] = {}
        for family in families:
            merged = self._by_name.setdefault(
                family.name, Metric(family.name, family.documentation, family.type, family.unit)
            )
            # Creation times would add a family to each histogram; the client library
            # can only leave them out for a whole process.
            created = f"{family.name}_created"
            merged.samples.extend(each for each in family.samples if each.name != created)

    def collect(self) -> Iterator[Metric]:
        yield from self._by_name.values()


def ingress(hops: Hops, timeouts: int) -> list[Metric]:
    """What happened to an ingress' requests: those that went on at another replica, and those
    that a deadline ended."""
    return [
        CounterMetricFamily(
            "quire:failovers",
            "Times that a request lost its replica and went on at another",
            value=hops.failovers,
        ),
        CounterMetricFamily(
            "quire:moves",
            "Times that a preempted request left a replica that had no room for it",
            value=hops.moves,
        ),
        CounterMetricFamily(
            "quire:request_timeouts",
            "Requests that were ended because they were not complete in time",
            value=timeouts,
        ),
    ]


def exposition(sources: Iterable[Iterable[Metric]]) -> bytes:
    """Prometheus text of all families; the `engine` label tells replicas apart."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(family for families in sources for family in families))
    return generate_latest(registry)
