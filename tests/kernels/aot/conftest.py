"""What the tests here compile, each once a run and in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kernels.aot.compiling import Compiled
from tests.kernels.aot.farm import run_apart
from tests.kernels.aot.survey import Finding, read_report

WORKERS = 2


@pytest.fixture(scope="session")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[Finding]:
    """The subset of all variants; see `subset.py`."""
    report: Path = tmp_path_factory.mktemp("aot") / "report.json"
    arguments = ("--subset", "--workers", str(WORKERS), "--report", str(report))
    ended = run_apart("tests.kernels.aot", *arguments, seconds=600)
    assert report.exists(), ended.stdout + ended.stderr
    return read_report(report)


@pytest.fixture(scope="session")
def bad_kernels() -> dict[str, Compiled]:
    """By name: `... bad`, `... good`, `fp8 on sm_80`."""
    ended = run_apart("tests.kernels.aot.bad_kernels", seconds=300)
    assert ended.returncode == 0, ended.stderr
    return {name: Compiled.of_json(item) for name, item in json.loads(ended.stdout).items()}
