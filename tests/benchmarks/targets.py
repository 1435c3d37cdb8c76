"""What the figures ought to be."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks.results import Results

STATIC_FACTOR = 2.7
SINGLE_MS = 12.0
HTTP_SHARE = 0.85


def target_lines(results: Results) -> Iterator[str]:
    """One line for each target: what was measured, and by how much it is met or missed."""
    ours = results.figure("in-process", "batch", "tok_s")
    static = results.figure("static", "batch", "tok_s")
    yield _at_least(
        "batch, in process against transformers generate",
        None if ours is None or static is None else ours / static,
        STATIC_FACTOR,
        "x",
    )
    floor = next((f"{f.value:.3g}" for f in results.floors if f.workload == "single"), "unknown")
    yield _at_most(
        f"single, in process (this machine's floor is {floor})",
        results.figure("in-process", "single", "ms_per_token"),
        SINGLE_MS,
        " ms a token",
    )
    for workload in results.workloads:
        ours = results.figure("in-process", workload.name, "tok_s")
        http = results.figure("cluster", workload.name, "tok_s")
        yield _at_least(
            f"{workload.name}, over HTTP against in process",
            None if ours is None or http is None else http / ours * 100,
            HTTP_SHARE * 100,
            "%",
        )


def _at_least(what: str, value: float | None, target: float, unit: str) -> str:
    if value is None:
        return f"{what}: target >= {target:g}{unit}; not measured"
    verdict = "met" if value >= target else f"missed by {1 - value / target:.0%}"
    return f"{what}: target >= {target:g}{unit}; measured {value:.3g}{unit}: {verdict}"


def _at_most(what: str, value: float | None, target: float, unit: str) -> str:
    if value is None:
        return f"{what}: target <= {target:g}{unit}; not measured"
    verdict = "met" if value <= target else f"missed by {value / target - 1:.0%}"
    return f"{what}: target <= {target:g}{unit}; measured {value:.3g}{unit}: {verdict}"
