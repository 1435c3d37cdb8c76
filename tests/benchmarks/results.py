"""What one run of the benchmark found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tests.benchmarks.figures import Figures
from tests.benchmarks.floors import Floor
from tests.benchmarks.idleness import Idleness
from tests.benchmarks.workload import Workload


@dataclass(frozen=True, slots=True)
class Cell:
    """A column's figures on one workload, or what it did instead."""

    workload: Workload
    """As it was carried out."""
    figures: Figures


@dataclass(slots=True)
class ColumnResult:
    """What one system showed."""

    name: str
    title: str
    idleness: Idleness
    """Of the box just before."""
    stolen: float = 0.0
    """Share of CPU time that other guests took meanwhile."""
    problem: str | None = None
    """Why there are no figures."""
    cells: dict[str, Cell] = field(default_factory=dict)
    """By the workload's name."""


@dataclass(slots=True)
class Results:
    """Everything that is reported."""

    machine: dict[str, Any]
    threads: int
    repeat: int
    forced: bool
    """Whether the box was allowed to be busy."""
    quick: bool
    workloads: tuple[Workload, ...]
    floors: list[Floor] = field(default_factory=list)
    columns: list[ColumnResult] = field(default_factory=list)
    guard: dict[str, Any] | None = None
    """What was compared with transformers, and found equal."""

    def figure(self, column: str, workload: str, figure: str) -> float | None:
        """One figure; None where it was not measured."""
        for result in self.columns:
            if result.name == column and workload in result.cells:
                value: float = getattr(result.cells[workload].figures, figure)
                return value
        return None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
