"""Prometheus families that bear one replica's labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

_LABELS = ("model_name", "engine")


class MetricFamilies:
    """Makes counters and gauges of values as they stand; keeps the histograms that it made.

    Names are whole, but a counter's is without its `_total`, an info's without its `_info`.
    """

    def __init__(self, model_name: str, replica_id: str) -> None:
        self._labels = (model_name, replica_id)
        self._registry = CollectorRegistry(auto_describe=False)

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """A value that rises and falls."""
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def info(self, name: str, text: str, values: Mapping[str, object]) -> Metric:
        """What never changes, as labels of a constant 1."""
        family = InfoMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, {key: str(value) for key, value in values.items()})
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        """A value that only grows."""
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        """One counter for each value that `label` takes."""
        family = CounterMetricFamily(name, text, labels=(*_LABELS, label))
        for kind, value in values.items():
            family.add_metric((*self._labels, kind), value)
        return family

    def histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        """A new histogram; `buckets` are upper bounds."""
        return self._histogram(name, text, buckets, _LABELS).labels(*self._labels)

    def histograms(
        self, name: str, text: str, buckets: Iterable[float], label: str, kinds: Iterable[str]
    ) -> dict[str, Histogram]:
        """New histograms of one name, one for each of the `kinds` that `label` takes."""
        family = self._histogram(name, text, buckets, (*_LABELS, label))
        return {kind: family.labels(*self._labels, kind) for kind in kinds}

    def collect(self) -> Iterable[Metric]:
        """The histograms as they stand; plain values that can be pickled."""
        return self._registry.collect()

    def _histogram(
        self, name: str, text: str, buckets: Iterable[float], labels: tuple[str, ...]
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=tuple(buckets), registry=self._registry)
