"""The results as text: a Markdown table and what has to be known to read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.benchmarks.results import Cell, ColumnResult, Results
from tests.benchmarks.targets import target_lines
from tests.benchmarks.workload import Workload

_ROWS = (
    ("batch", "tok_s", "tok/s"),
    ("single", "ms_per_token", "ms a token"),
    ("shared", "tok_s", "tok/s"),
    ("shared", "ttft_p50_ms", "TTFT p50, ms"),
    ("shared", "ttft_p99_ms", "TTFT p99, ms"),
)
_NOTHING = "-"


def render(results: Results) -> str:
    """The whole report."""
    return "\n".join(
        [*_heading(results), "", *_table(results), "", *_floors(results), "", *_targets(results)]
    )


def _heading(results: Results) -> Iterator[str]:
    machine = results.machine
    bf16 = "native" if machine["native_bf16"] else "emulated"
    yield (
        f"{machine['cpu']}, {machine['cores']} cores, {results.threads} threads used, "
        f"bf16 {bf16}; Python {machine['python']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}"
    )
    repeats = "one run each" if results.repeat == 1 else f"medians of {results.repeat} runs"
    yield f"SmolLM2-135M-Instruct, {machine['dtype']}, greedy; {repeats}"
    if results.guard:
        yield (
            f"float32: our first {results.guard['new_tokens']} tokens of "
            f"{results.guard['prompts']} batch prompts equal those of transformers generate"
        )
    if results.forced:
        yield "FORCED: the box was allowed to be busy, the figures may mean nothing"
    if results.quick:
        yield "QUICK: tiny workloads, the figures mean nothing"


def _table(results: Results) -> Iterator[str]:
    rows = [["workload", "", "floor", *(column.title for column in results.columns)]]
    for name, figure, unit in _ROWS:
        workload = next((w for w in results.workloads if w.name == name), None)
        if workload is not None:
            floor = _floor(results, name, figure)
            cells = [_cell(column, workload, figure) for column in results.columns]
            rows.append([workload.title, unit, floor, *cells])
    before = [str(column.idleness) for column in results.columns]
    rows.append(["box before", "", "", *before])
    stolen = [f"{column.stolen:.1%}" for column in results.columns]
    rows.append(["stolen meanwhile", "", "", *stolen])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, ["-" * width for width in widths])
    for row in rows:
        line = " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"| {line} |"


def _cell(column: ColumnResult, workload: Workload, figure: str) -> str:
    if column.problem is not None:
        return column.problem
    cell = column.cells.get(workload.name)
    if cell is None:
        return _NOTHING
    return f"{getattr(cell.figures, figure):.1f}{_bounds(cell, workload)}"


def _bounds(cell: Cell, workload: Workload) -> str:
    """What a bounded column was spared."""
    done, less = cell.workload, []
    if done.requests < workload.requests:
        less.append(f"{done.requests} requests")
    if done.new_tokens < workload.new_tokens:
        less.append(f"{done.new_tokens} new")
    return f" ({', '.join(less)})" if less else ""


def _floor(results: Results, workload: str, figure: str) -> str:
    for floor in results.floors:
        if (floor.workload, floor.figure) == (workload, figure):
            return f"{floor.value:.1f}"
    return _NOTHING


def _floors(results: Results) -> Sequence[str]:
    machine = results.machine
    rates = [
        f"{name} GEMM {rate['large']:.0f} GFLOP/s, {rate['rows_64']:.0f} at 64 rows"
        for name, rate in machine["gemm_gflop_s"].items()
    ]
    lines = [f"This machine: reads {machine['read_gb_s']:.1f} GB/s; {'; '.join(rates)}"]
    lines += [f"Floor of {floor.workload}: {floor.arithmetic}" for floor in results.floors]
    return lines


def _targets(results: Results) -> Sequence[str]:
    lines = [f"- {line}" for line in target_lines(results)]
    return ["Targets (set for two threads in bfloat16):", *lines]
