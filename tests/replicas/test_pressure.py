"""What the autoscaler is told."""

from __future__ import annotations

import pytest

from replicas.pressure import KV_USED, PREEMPTIONS_PER_S, QUEUE_S, Pressure, PressureGauge
from replicas.protocol import EngineInfo, ReplicaSnapshot

ENGINE = EngineInfo("cpu", "float32", "float32", 16, 200, 1000, 50)


def test_queue_and_pool_are_read_in_seconds_and_shares() -> None:
    load = ReplicaSnapshot(used_blocks=150, queued_tokens=3000, prefill_tokens_per_s=1500.0)
    assert PressureGauge(ENGINE, 0.0).read(load, 1.0) == Pressure(2.0, 0.75, 0.0)


def test_preemptions_are_those_since_the_last_reading() -> None:
    gauge = PressureGauge(ENGINE, 10.0)
    counts = [(14.0, 8, 2.0), (16.0, 8, 0.0), (16.0, 9, 0.0), (18.0, 10, 0.5)]
    for now, count, rate in counts:
        pressure = gauge.read(ReplicaSnapshot(preemptions=count), now)
        assert pressure.preemptions_per_s == pytest.approx(rate)


def test_a_replica_that_never_prefilled_has_no_queue_to_speak_of() -> None:
    load = ReplicaSnapshot(queued_tokens=500)
    stats = PressureGauge(ENGINE, 0.0).read(load, 1.0).as_stats()
    assert stats == {QUEUE_S: 0.0, KV_USED: 0.0, PREEMPTIONS_PER_S: 0.0}
