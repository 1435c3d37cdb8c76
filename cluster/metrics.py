"""One /metrics for all replicas: their families, merged by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


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


def exposition(replicas: Iterable[Iterable[Metric]]) -> bytes:
    """Prometheus text of all replicas' families; the `engine` label tells them apart."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(family for families in replicas for family in families))
    return generate_latest(registry)
