"""The router's benchmark: its model's arithmetic, and that a quick run gives tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.benchmarks.router_model import engines
from tests.benchmarks.router_model.cache import Cache, Lru
from tests.benchmarks.router_model.cases import CASES, OURS, policies
from tests.benchmarks.router_model.model import Replica, Setup
from tests.benchmarks.router_model.ours import Ours
from tests.benchmarks.router_model.peers import RoundRobin
from tests.benchmarks.router_model.reference import REFERENCES, Target
from tests.benchmarks.router_model.simulate import simulate
from tests.benchmarks.router_model.workload import Hot, Request, Workload, mooncake

ROOT = Path(__file__).parents[1]


def test_the_least_recently_used_blocks_go_to_the_host_first() -> None:
    node_host = Counter[int]()
    cache = Cache(3, 2, node_host)
    cache.use([1, 2, 3])
    cache.use([1, 4])
    assert cache.hits([1, 2, 3]) == (1, 1)
    assert cache.hits([3, 1, 4, 2, 9]) == (3, 1)
    cache.use([5, 6, 7])
    assert (sorted(node_host), cache.hits([2])) == ([1, 4], (0, 0))
    cache.leave()
    assert not node_host


def test_an_lru_of_one_keeps_one() -> None:
    lru = Lru(1)
    assert lru.touch([1, 2, 3]) == [1, 2]
    assert lru.leading([3, 4]) == 1


def test_prefill_is_first_come_first_served() -> None:
    replica = Replica("r", Setup(), Counter())
    replica.advance(1.0)
    first, *_ = replica.place(Request(1.0, 10_000, 100, tuple(range(20))))
    second, cached, _ = replica.place(Request(1.0, 10_000, 100, tuple(range(20))))
    assert first.first_token_at == pytest.approx(2.0)
    assert cached == 9999, "one token is always computed"
    assert second.first_token_at == pytest.approx(2.0001)
    assert (replica.waiting, replica.queued_tokens) == (2, 10_001)
    replica.advance(2.0)
    assert (replica.waiting, replica.running) == (1, 1)
    assert first.end == pytest.approx(2.0 + 100 * 0.025 * (1 + 1 / 64))
    replica.advance(100.0)
    assert (replica.in_flight, replica.active_blocks()) == (0, 0)


def test_requests_of_one_moment_are_spread_over_it(tmp_path: Path) -> None:
    trace = _trace(tmp_path, 40)
    requests = mooncake(trace, "t").requests
    times = [each.at for each in requests]
    assert times == sorted(times)
    assert len(set(times)) == 40
    assert [int(at // 3) for at in times] == [number // 10 for number in range(40)]
    assert (
        mooncake(trace, "t", seed=0).requests == requests != mooncake(trace, "t", seed=1).requests
    )


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    trace = _trace(tmp_path, 2)
    trace.write_text(trace.read_text() + '{"timestamp": 5}\n')
    with pytest.raises(ValueError, match="line 3"):
        mooncake(trace, "t")


def test_ours_finds_the_prefixes_that_round_robin_misses() -> None:
    setup, workload = Setup(), Hot(requests=300, requests_per_s=5.0).make()
    ours = simulate(Ours(setup, workload.mean_output_tokens), workload, setup)
    turns = simulate(RoundRobin(), workload, setup)
    assert ours.hit > turns.hit + 10
    assert ours.ttft_mean_s < turns.ttft_mean_s


def test_every_policy_has_its_reference() -> None:
    for references in REFERENCES.values():
        assert list(references) == policies()


def test_targets_say_by_how_much_they_are_missed() -> None:
    assert str(Target("hit", 13.0, 13.4, at_least=True)).endswith("MISSED by 0.400")
    assert Target("p99", 1.0, 1.1).met


def test_a_quick_run_fills_the_tables(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.benchmarks.router", "--quick", "--decisions"]
    command += ["--trace", str(_trace(tmp_path, 60)), "--workers", "1", "--json", str(file)]
    command += ["--policy", "round robin", "--policy", OURS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    runs = results["model"]["runs"]
    assert len(runs) == 2 * len(CASES)
    assert all(0 < run["hit"] < 100 and run["ttft_mean_s"] > 0 for run in runs)
    real = results["engines"]
    assert len(real) == 2 * len(engines.CASES)
    assert all(run["requests"] > 0 and run["ttft_s"]["mean"] > 0 for run in real)
    assert done.stdout.count("| ours / best rival |") == len(engines.CASES)
    assert [row["replicas"] for row in results["decisions"]] == [8, 64]
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in results["decisions"])
    assert done.stdout.count("###") == len(CASES) + len(engines.CASES) + 1
    assert f"| {OURS} |" in done.stdout


def test_a_trace_or_decisions_are_asked_for() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.router"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--trace" in done.stderr


def _trace(folder: Path, requests: int) -> Path:
    """Ten requests every three seconds, in families of four."""
    path = folder / "trace.jsonl"
    lines = [
        {
            "timestamp": 3000 * (number // 10),
            "input_length": 512 * 8,
            "output_length": 50,
            "hash_ids": [
                *range(number % 4 * 6, number % 4 * 6 + 6),
                100 + 2 * number,
                101 + 2 * number,
            ],
        }
        for number in range(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_workloads_scale_in_time_alone() -> None:
    workload = Workload("w", (Request(7.0, 10, 10, (1,)), Request(14.0, 10, 10, (2,))))
    assert [each.at for each in workload.faster(1.75).requests] == [4.0, 8.0]
