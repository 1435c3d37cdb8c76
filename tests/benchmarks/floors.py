"""The least time a machine needs for a workload, whatever the software."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.benchmarks.plan import Run


@dataclass(frozen=True, slots=True)
class Floor:
    """A figure of the table that nothing on this machine can beat, and why."""

    workload: str
    figure: str
    """A field of `Figures`."""
    value: float
    arithmetic: str


def floors(machine: dict[str, Any], runs: list[Run]) -> list[Floor]:
    """Of the workloads among the runs that have one; attention is left out of account."""
    by_name = {run.workload.name: run for run in runs}
    found = []
    if "batch" in by_name:
        found.append(_batch(machine, by_name["batch"]))
    if "single" in by_name:
        found.append(_single(machine))
    return found


def _batch(machine: dict[str, Any], run: Run) -> Floor:
    """A prompt token needs all weights but the output projection, a new one needs all."""
    rates = machine["gemm_gflop_s"][machine["dtype"]]
    prompt_tokens = sum(len(p.token_ids) for p in run.prompts)
    new_tokens = run.workload.new_tokens * len(run.prompts)
    everything = machine["parameters"] / 1e6
    body = everything - machine["head_parameters"] / 1e6
    prefill_s = 2 * body * prompt_tokens / rates["large"] / 1e3
    decode_s = 2 * everything * new_tokens / rates["rows_64"] / 1e3
    seconds = prefill_s + decode_s
    return Floor(
        "batch",
        "tok_s",
        new_tokens / seconds,
        f"2 x {body:.0f} M parameters x {prompt_tokens} prompt tokens "
        f"/ {rates['large']:.0f} GFLOP/s = {prefill_s:.2f} s; "
        f"2 x {everything:.0f} M x {new_tokens} new tokens "
        f"/ {rates['rows_64']:.0f} GFLOP/s (64 rows) = {decode_s:.2f} s; "
        f"{new_tokens} tokens in {seconds:.2f} s",
    )


def _single(machine: dict[str, Any]) -> Floor:
    megabytes = machine["weight_bytes"] / 1e6
    milliseconds = megabytes / machine["read_gb_s"]
    return Floor(
        "single",
        "ms_per_token",
        milliseconds,
        f"{megabytes:.0f} MB of weights / {machine['read_gb_s']:.1f} GB/s = {milliseconds:.1f} ms",
    )
