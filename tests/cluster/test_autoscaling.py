"""How many replicas are wanted under which pressure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.autoscaling import PressurePolicy, Targets, desired_replicas
from replicas.pressure import KV_USED, PREEMPTIONS_PER_S, QUEUE_S, Pressure

TARGETS = Targets(queue_s=2.0, kv_used=0.8, preemptions_per_s=0.1)
AT_TARGET = Pressure(queue_s=2.0, kv_used=0.8)


@pytest.mark.parametrize(
    ("pressure", "wanted"),
    [
        (AT_TARGET, 4.0),
        (Pressure(queue_s=4.0), 8.0),
        (Pressure(kv_used=0.4), 2.0),
        (Pressure(queue_s=1.0, kv_used=0.8), 4.0),
        (Pressure(queue_s=0.0, kv_used=0.1, preemptions_per_s=0.2), 5.0),
        (Pressure(queue_s=6.0, preemptions_per_s=9.0), 12.0),
        (Pressure(), 1.0),
    ],
)
def test_four_equal_replicas(pressure: Pressure, wanted: float) -> None:
    assert desired_replicas([pressure] * 4, TARGETS, ongoing=3) == pytest.approx(wanted)


def test_one_busy_replica_among_idle_ones_is_no_reason_for_more() -> None:
    one = [Pressure(queue_s=6.0, kv_used=0.9), *[Pressure()] * 3]
    assert desired_replicas(one, TARGETS, ongoing=1) == pytest.approx(3.0)


def test_nothing_to_do_wants_nothing() -> None:
    assert desired_replicas([Pressure()] * 3, TARGETS, ongoing=0) == 0.0


_pressure = st.builds(
    Pressure,
    queue_s=st.floats(0, 100),
    kv_used=st.floats(0, 1),
    preemptions_per_s=st.floats(0, 10),
)


@given(st.lists(_pressure, min_size=1, max_size=8), st.integers(0, 7))
def test_more_pressure_never_wants_fewer(pressures: list[Pressure], index: int) -> None:
    before = desired_replicas(pressures, TARGETS, ongoing=1)
    old = pressures[index % len(pressures)]
    pressures[index % len(pressures)] = Pressure(
        old.queue_s + 1, min(1.0, old.kv_used + 0.1), old.preemptions_per_s + 0.1
    )
    assert desired_replicas(pressures, TARGETS, ongoing=1) >= before >= 1.0


@dataclass
class Context:
    target_num_replicas: int = 3
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None = None
    total_num_requests: float = 0.0
    policy_state: dict[str, Any] = field(default_factory=dict)


def policy() -> PressurePolicy:
    return PressurePolicy(queue_s=2.0, kv_used=0.8, preemptions_per_s=0.1)


@pytest.mark.parametrize("metrics", [None, {}, {QUEUE_S: {}}])
def test_silence_changes_nothing(metrics: Mapping[str, Mapping[Any, float]] | None) -> None:
    assert policy()(Context(aggregated_metrics=metrics)) == (3.0, {})


def test_what_replicas_recorded_is_read_by_name() -> None:
    metrics = {
        QUEUE_S: {"a": 4.0, "b": 2.0},
        KV_USED: {"a": 0.1, "b": 0.2},
        PREEMPTIONS_PER_S: {"a": 0.0, "b": 0.0},
    }
    wanted, _ = policy()(Context(aggregated_metrics=metrics, total_num_requests=5))
    assert wanted == pytest.approx(3.0)


def test_a_replica_that_recorded_some_of_it_counts() -> None:
    wanted, _ = policy()(Context(aggregated_metrics={KV_USED: {"a": 0.8, "b": 0.8}}))
    assert wanted == pytest.approx(2.0)
