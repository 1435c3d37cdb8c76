"""The results of `quire simulate` as a table: a column a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from router.simulator.measurements import Limits, Percentiles, Report


class Result(Protocol):
    """What is known of one policy."""

    @property
    def policy(self) -> str: ...
    @property
    def report(self) -> Report: ...
    @property
    def wall_s(self) -> float: ...


def render(run: Mapping[str, Any], limits: Limits, results: Sequence[Result]) -> str:
    """What was simulated, then a row a figure."""
    rows = [["", *(result.policy for result in results)]]
    for label, show in _rows(limits):
        rows.append([label, *(show(result) for result in results)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in cells)
        for cells in (enumerate(zip(row, widths, strict=True)) for row in rows)
    ]
    return "\n".join([*_heading(run), "", *(line.rstrip() for line in lines)])


def _heading(run: Mapping[str, Any]) -> list[str]:
    load = (
        f"{run['trace']}: {run['requests']:,} requests, {run['prompt_tokens']:,} prompt and "
        f"{run['output_tokens']:,} output tokens, arriving in {run['duration_s']:,.0f} s "
        f"(x{run['speed']:g})"
    )
    host = f", host tier of {run['host_tokens']:,} tokens" if run["host_tokens"] else ""
    plural = "s" if run["replicas"] > 1 else ""
    replicas = (
        f"{run['replicas']:,} replica{plural}: "
        f"{run['model']} on {run['gpus_a_replica']} x {run['gpu']}, "
        f"KV pool of {run['kv_tokens']:,} tokens in blocks of {run['block_size']}{host}"
    )
    return [load, replicas]


def _rows(limits: Limits) -> list[tuple[str, Callable[[Result], str]]]:
    return [
        ("hit rate, device", lambda r: f"{r.report.device_hit_rate:.1%}"),
        ("hit rate, host tier", lambda r: f"{r.report.host_hit_rate:.1%}"),
        ("TTFT mean, s", lambda r: f"{r.report.ttft_s.mean:.3f}"),
        ("TTFT p50 / p90 / p99, s", lambda r: _times(r.report.ttft_s, 1.0, 2)),
        ("ITL p50 / p90 / p99, ms", lambda r: _times(r.report.itl_s, 1e3, 1)),
        ("E2E p50 / p90 / p99, s", lambda r: _times(r.report.e2e_s, 1.0, 1)),
        ("most requests over mean", lambda r: f"{r.report.imbalance:.2f}"),
        ("preempted, to recompute", lambda r: f"{r.report.preemptions_recompute:,}"),
        ("preempted, by swap", lambda r: f"{r.report.preemptions_swap:,}"),
        ("output tokens/s", lambda r: f"{r.report.output_tokens_per_s:,.0f}"),
        (
            f"goodput, requests/s (TTFT <= {limits.ttft_s:g} s, ITL <= {limits.itl_s:g} s)",
            lambda r: f"{r.report.goodput_rps:.2f}",
        ),
        ("requests within both", lambda r: f"{r.report.good_share:.1%}"),
        ("served / refused", lambda r: f"{r.report.requests:,} / {r.report.refused:,}"),
        ("simulated / taken, s", lambda r: f"{r.report.simulated_s:,.0f} / {r.wall_s:,.1f}"),
    ]


def _times(times: Percentiles, scale: float, digits: int) -> str:
    values = (times.p50, times.p90, times.p99)
    return " / ".join(f"{value * scale:.{digits}f}" for value in values)
