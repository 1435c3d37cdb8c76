"""One run of the benchmark: the machine, the guard, then a column after the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.benchmarks.column import OURS, Column
from tests.benchmarks.figures import Figures, Served
from tests.benchmarks.floors import floors
from tests.benchmarks.idleness import CpuTimes, Idleness
from tests.benchmarks.job import JobError, run_job
from tests.benchmarks.plan import Plan, Run, Say
from tests.benchmarks.prompts import PromptSource
from tests.benchmarks.results import Cell, ColumnResult, Results
from tests.benchmarks.workload import QUICK_WARM_UP, WARM_UP, Workload

MAX_BUSY = 0.15
"""Share of the CPU that may be in other use; a busier box gives no figures."""
_GUARD_PROMPTS = 4
_GUARD_TOKENS = 16
_LOOK_S = 2.0
_QUICK_LOOK_S = 0.3
_PATIENCE_S = 60.0
"""For a box to calm down after the column before."""


class BusyError(RuntimeError):
    """The box is doing something else."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is to be measured, and how."""

    columns: tuple[Column, ...]
    workloads: tuple[Workload, ...]
    """All there are: prompts do not depend on which of them are wanted."""
    wanted: frozenset[tuple[str, str]]
    """(workload, column) by name."""
    plan: Plan
    """Without runs."""
    repeat: int
    seed: int
    force: bool


class Bench:
    """Measures; `run` is called once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._started = time.monotonic()

    def run(self) -> Results:
        """Everything that was asked for; a column that fails says so in its cells.

        Raises:
            BusyError: the box is not idle, and that was not forced.
            JobError: the machine cannot be measured, or our tokens are not transformers'.
        """
        settings = self._settings
        self._wait_for_idle_box("start", patience_s=0)
        machine = run_job(
            "tests.benchmarks.machine", sys.executable, settings.plan, self._say_as("machine")
        )
        plan = replace(settings.plan, dtype=machine["dtype"])
        warm_up, repeats = self._prompts(plan.folder)
        names = {name for name, _ in settings.wanted}
        wanted = [run for run in repeats[0] if run.workload.name in names]
        results = Results(
            machine=machine,
            threads=plan.threads,
            repeat=settings.repeat,
            forced=settings.force,
            quick=plan.quick,
            workloads=tuple(run.workload for run in wanted),
            floors=floors(machine, wanted),
        )
        if any(column in OURS for column in settings.columns):
            results.guard = self._guard(plan, repeats[0])
        for column in settings.columns:
            runs = [
                run.cut(column.max_requests, column.max_new_tokens)
                for repeat in repeats
                for run in repeat
                if (run.workload.name, column.name) in settings.wanted
            ]
            ready = replace(plan, warm_up=warm_up, runs=tuple(runs))
            results.columns.append(self._measure(column, ready))
        return results

    def _prompts(self, folder: Path) -> tuple[Run, list[list[Run]]]:
        """The warm-up's and each repeat's; no two of them the same."""
        source = PromptSource(folder, self._settings.seed)
        workload = QUICK_WARM_UP if self._settings.plan.quick else WARM_UP
        warm_up = Run(workload, source.take(workload))
        repeats = [
            [Run(workload, source.take(workload)) for workload in self._settings.workloads]
            for _ in range(self._settings.repeat)
        ]
        return warm_up, repeats

    def _guard(self, plan: Plan, runs: Sequence[Run]) -> dict[str, int]:
        batch = next(run for run in runs if run.workload.name == "batch")
        run = batch.cut(_GUARD_PROMPTS, None)
        run = replace(run, workload=replace(run.workload, new_tokens=_GUARD_TOKENS))
        plan = replace(plan, dtype="float32", runs=(run,))
        return run_job("tests.benchmarks.guard", sys.executable, plan, self._say_as("guard"))

    def _measure(self, column: Column, plan: Plan) -> ColumnResult:
        idleness = self._wait_for_idle_box(column.name, _PATIENCE_S)
        result = ColumnResult(column.name, column.title, idleness)
        before = CpuTimes.now()
        try:
            report = run_job(column.module, column.python, plan, self._say_as(column.name))
        except JobError as error:
            self._say(str(error))
            result.problem = "failed"
            return result
        result.stolen = CpuTimes.now().stolen_since(before)
        if "not_installed" in report:
            result.problem = f"{report['not_installed']} not installed"
            return result
        repeats: dict[str, list[Figures]] = {}
        for run, served in zip(plan.runs, report["runs"], strict=True):
            figures = Figures.of([Served(*fields) for fields in served])
            repeats.setdefault(run.workload.name, []).append(figures)
            result.cells[run.workload.name] = Cell(
                run.workload, Figures.median(repeats[run.workload.name])
            )
        return result

    def _wait_for_idle_box(self, what: str, patience_s: float) -> Idleness:
        seconds = _QUICK_LOOK_S if self._settings.plan.quick else _LOOK_S
        deadline = time.monotonic() + patience_s
        while True:
            idleness = Idleness.look(seconds)
            if idleness.busy <= MAX_BUSY:
                self._say(f"{what}: box {idleness}")
                return idleness
            if self._settings.force:
                self._say(f"{what}: box {idleness}: going on, as forced")
                return idleness
            if time.monotonic() >= deadline:
                raise BusyError(
                    f"the box is {idleness}; at most {MAX_BUSY:.0%} may be busy with other "
                    "things (--force measures nevertheless)"
                )

    def _say_as(self, name: str) -> Say:
        return lambda line: self._say(f"{name}: {line}")

    def _say(self, line: str) -> None:
        elapsed = time.monotonic() - self._started
        print(f"[{elapsed:6.1f} s] {line}", file=sys.stderr, flush=True)
