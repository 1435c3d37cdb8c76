"""One exposition of all replicas' families."""

from __future__ import annotations

import re

from cluster.failover import Hops
from cluster.metrics import exposition, ingress
from replicas.core.scheduler_output import ResumeCost, StepOutcome
from replicas.core.scheduler_stats import SchedulerStats
from replicas.metrics import EngineMetrics
from replicas.protocol import EngineInfo, ReplicaSnapshot


def text_of(*preemptions: int) -> str:
    """The exposition of a replica for each of `preemptions`, called r0, r1, ..."""
    info = EngineInfo("cpu", "float32", "float32", 16, 40, 100, 512, host_blocks=80)
    replicas = []
    for index, count in enumerate(preemptions):
        metrics = EngineMetrics("a-model", f"r{index}", info)
        cost = ResumeCost(("a", 0), swapped=True, predicted_s=1.0, actual_s=2.0, stall_s=3.0)
        outcome = StepOutcome(resumed=(cost,) * count)
        stats = SchedulerStats(preemptions=count, swaps=count)
        metrics.observe(outcome, ReplicaSnapshot(host_blocks=20 * index), stats)
        replicas.append(metrics.collect())
    return exposition(replicas).decode()


def test_replicas_are_told_apart_within_one_family() -> None:
    lines = text_of(2, 7).splitlines()
    name = "quire:preemptions_total"
    assert [line for line in lines if line.startswith(f"{name}{{") and "swap" in line] == [
        f'{name}{{engine="r0",mode="swap",model_name="a-model"}} 2.0',
        f'{name}{{engine="r1",mode="swap",model_name="a-model"}} 7.0',
    ]
    heads = [line for line in lines if line.startswith("# TYPE")]
    assert f"# TYPE {name} counter" in heads
    assert "# TYPE quire:preemption_stall_seconds histogram" in heads
    assert "# TYPE quire:host_tier_usage_perc gauge" in heads
    assert "# TYPE vllm:cache_config_info gauge" in heads
    assert len(heads) == len(set(heads))


def test_creation_times_are_left_out_and_nothing_else_is() -> None:
    text = text_of(1)
    assert "_created" not in text
    sums = set(re.findall(r"^(\S+)_sum{", text, re.MULTILINE))
    assert "quire:preemption_stall_seconds" in sums
    assert sums == set(re.findall(r"^# TYPE (\S+) histogram$", text, re.MULTILINE))
    assert sums == set(re.findall(r"^(\S+)_bucket{", text, re.MULTILINE))


def test_no_replica_makes_no_text() -> None:
    assert exposition([]) == b""


def test_an_ingress_tells_what_became_of_its_requests() -> None:
    text = exposition([ingress(Hops(failovers=2, moves=3), timeouts=4)]).decode()
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        "quire:failovers_total 2.0",
        "quire:moves_total 3.0",
        "quire:request_timeouts_total 4.0",
    ]
