"""The benchmark's arithmetic, and that a quick run gives a table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from replicas.models.sources import resolve
from tests.benchmarks.column import columns
from tests.benchmarks.figures import Figures, Served, percentile
from tests.benchmarks.idleness import CpuTimes
from tests.benchmarks.options import select
from tests.benchmarks.plan import Plan, Run
from tests.benchmarks.prompts import PromptSource
from tests.benchmarks.workload import QUICK, STANDARD

ROOT = Path(__file__).parents[1]


def test_figures_count_from_the_first_request_to_the_last_token() -> None:
    served = [Served(10.0, 11.0, 13.0, tokens=5), Served(12.0, 15.0, 20.0, tokens=11)]
    figures = Figures.of(served)
    assert figures.tok_s == pytest.approx(1.6)
    assert figures.ms_per_token == pytest.approx(500.0)
    assert (figures.ttft_p50_ms, figures.ttft_p99_ms) == pytest.approx((1000.0, 3000.0))


@pytest.mark.parametrize(("rank", "value"), [(1, 1.0), (50, 2.0), (75, 3.0), (99, 4.0)])
def test_percentiles_are_by_nearest_rank(rank: int, value: float) -> None:
    assert percentile([3.0, 1.0, 4.0, 2.0], rank) == value


def test_stolen_time_is_busy_time_and_guests_count_once() -> None:
    earlier = CpuTimes.parse("cpu  100 0 100 800 0 0 0 0 50 0\ncpu0 1 1 1 1\n")
    later = CpuTimes.parse("cpu  110 0 110 860 10 0 0 10 60 0\n")
    assert later.busy_since(earlier) == pytest.approx(0.3)
    assert later.stolen_since(earlier) == pytest.approx(0.1)


def test_only_takes_either_part_or_both() -> None:
    known = columns("")
    everything = {(w.name, c.name) for w in STANDARD for c in known}
    assert select([], STANDARD, known) == everything
    assert select(["batch/static"], STANDARD, known) == {("batch", "static")}
    assert select(["batch", "single/cluster"], STANDARD, known) == {
        *((w, c) for w, c in everything if w == "batch"),
        ("single", "cluster"),
    }
    with pytest.raises(ValueError, match="'bach' is not known"):
        select(["bach/static"], STANDARD, known)


def test_peers_are_named_with_their_interpreters() -> None:
    vllm, openvino = columns("vllm=/opt/python, openvino")[-2:]
    assert (vllm.name, vllm.python) == ("vllm", "/opt/python")
    assert (openvino.name, openvino.python) == ("openvino", sys.executable)
    with pytest.raises(ValueError, match="'llama' is not known"):
        columns("llama")


def test_prompts_share_a_block_only_where_they_are_meant_to() -> None:
    source = PromptSource(resolve("embedded"), seed=3)
    for workload in (*STANDARD, *STANDARD):
        prompts = [p.token_ids for p in source.take(workload)]
        wanted = workload.prefix_tokens + workload.own_tokens
        assert all(abs(len(p) - wanted) < 8 for p in prompts)
        heads = {p[:16] for p in prompts}
        assert len(heads) == (1 if workload.prefix_tokens else workload.requests)
        assert len(set(prompts)) == workload.requests


def test_a_plan_survives_its_journey(tmp_path: Path) -> None:
    source = PromptSource(resolve("embedded"), seed=3)
    runs = tuple(Run(workload, source.take(workload)) for workload in QUICK)
    plan = Plan(tmp_path, "float32", 2, True, tmp_path, warm_up=runs[0], runs=runs)
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_fills_the_table(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--force", "--threads", "1"]
    command += ["--only", "in-process", "--only", "static", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    assert results["guard"] == {"prompts": 4, "new_tokens": 16}
    assert [column["name"] for column in results["columns"]] == ["in-process", "static"]
    for column in results["columns"]:
        assert column["cells"].keys() == {workload.name for workload in QUICK}
        for cell in column["cells"].values():
            assert all(value > 0 for value in cell["figures"].values())
    assert "batch, in process against transformers generate: target >= 2.7x; measured" in (
        done.stdout
    )
