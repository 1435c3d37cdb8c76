"""What a router counts, for the /metrics of the ingress whose process it shares."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
"""Serve makes a router for each handle; those of one process count together."""

PLACEMENTS = Counter(
    "quire:placements", "Requests placed on a replica", ["policy"], registry=REGISTRY
)
STALE_PLACEMENTS = Counter(
    "quire:stale_placements",
    "Placements for which no replica's state was known, so that bookings alone decided",
    registry=REGISTRY,
)
DECISION_SECONDS = Histogram(
    "quire:placement_seconds",
    "Time that a placement took, the hashing of the prompt included",
    buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1),
    registry=REGISTRY,
)
INDEX_BLOCKS = Gauge(
    "quire:prefix_index_blocks", "Blocks that the router knows to be somewhere", registry=REGISTRY
)
INDEX_REFUSED = Counter(
    "quire:prefix_index_refused_blocks",
    "Blocks that the router did not take note of, as its index was full",
    registry=REGISTRY,
)
REPLICAS = Gauge(
    "quire:router_replicas",
    "Replicas to choose from: fresh ones, and stale ones, of which only bookings are known",
    ["feed"],
    registry=REGISTRY,
)
FEED_GAPS = Counter(
    "quire:feed_gaps", "Replicas' feeds that lost steps and began anew", registry=REGISTRY
)
