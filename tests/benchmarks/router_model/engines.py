"""The cases of the simple model with the real scheduler in the loop: chunked prefill beside
decoding, blocks that run short, preemption and the real host tier, on a roofline of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, cast

from replicas.config import EngineConfig
from replicas.core.scheduler import SchedulerConfig
from router.placement import POLICIES, Placer
from router.simulator.hardware import HARDWARE
from router.simulator.machine import Machine
from router.simulator.measurements import Limits, Report
from router.simulator.models import MODELS
from router.simulator.replica import ReplicaSettings
from router.simulator.simulation import Simulation
from router.simulator.trace import BlockIds, Trace, TraceRequest
from tests.benchmarks.router_model.cases import HOST_SHARE, OURS, WORKLOADS, Case, Run, Source
from tests.benchmarks.router_model.model import Setup
from tests.benchmarks.router_model.peers import peers
from tests.benchmarks.router_model.rival import Rival
from tests.benchmarks.router_model.workload import BLOCK_TOKENS, Workload

REQUESTS = 1000
"""Of each workload. The conversations' prompts fill the cluster's KV three times."""
FEED_DELAY_S = 0.005
"""Until a router knows of a step. Rivals are told at once."""
LIMITS = Limits(ttft_s=5.0, itl_s=0.1)
CASES = (
    *(Case(name) for name in WORKLOADS),
    *(Case(name, host=True) for name in WORKLOADS),
)
HIGHER, LOWER = 1, -1
MEASURES: dict[str, tuple[int, Callable[[Report], float]]] = {
    "hit %": (HIGHER, lambda r: 100 * (r.device_hit_rate + r.host_hit_rate)),
    "of it host": (0, lambda r: 100 * r.host_hit_rate),
    "TTFT mean s": (LOWER, lambda r: r.ttft_s.mean),
    "p99 s": (LOWER, lambda r: r.ttft_s.p99),
    "E2E mean s": (LOWER, lambda r: r.e2e_s.mean),
    "ITL p99 ms": (LOWER, lambda r: 1000 * r.itl_s.p99),
    "good %": (HIGHER, lambda r: 100 * r.good_share),
    "imbalance": (LOWER, lambda r: r.imbalance),
    "preempted": (0, lambda r: r.preemptions_recompute + r.preemptions_swap),
}
"""What is better, and what it is. 0: neither."""


def settings(*, host: bool) -> ReplicaSettings:
    """The simple model's KV in an engine with its defaults. The GPU is one on which the trace is
    a load, at either speed, and not a queue that grows to its end."""
    setup = Setup(host_share=HOST_SHARE if host else 0.0)
    machine = Machine.fitting(MODELS["llama-3.1-8b"], HARDWARE["h100"])
    scheduling = SchedulerConfig(
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        max_model_len=machine.model.max_position,
        overcommit=EngineConfig().overcommit,
    )
    return ReplicaSettings(
        machine, scheduling, BLOCK_TOKENS, setup.device_blocks, setup.host_blocks
    )


def run_all(
    source: Source, names: Sequence[str], workers: int, say: Callable[[str], None]
) -> dict[Run, Report]:
    """Some at a time, each in one process; the longest first."""
    wanted = [Run(case, name, 0) for case in CASES for name in names]
    found: dict[Run, Report] = {}
    with ProcessPoolExecutor(workers) as pool:
        futures = {pool.submit(carry_out, source, run): run for run in wanted}
        for number, future in enumerate(as_completed(futures), start=1):
            run, (report, wall_s) = futures[future], future.result()
            found[run] = report
            say(f"{number}/{len(wanted)} {run.case.title}: {run.policy}: {wall_s:.0f} s")
    return {run: found[run] for run in wanted}


def carry_out(source: Source, run: Run) -> tuple[Report, float]:
    """One run, and the seconds it took."""
    began = time.perf_counter()
    workload = source.workload(run.case.workload, run.replay)
    rival = None
    placer = Placer(POLICIES["prefix_aware"]())
    if run.policy != OURS:
        rival = Rival(peers(Setup())[run.policy](), workload.requests)
        placer = cast(Placer, rival)
    replicas = Setup().replicas
    simulation = Simulation(
        trace(workload),
        settings(host=run.case.host),
        placer,
        num_replicas=replicas,
        replicas_a_node=replicas,
        feed_delay_s=0.0 if rival else FEED_DELAY_S,
    )
    if rival is not None:
        rival.watch(simulation.replicas)
    return simulation.run().report(LIMITS), time.perf_counter() - began


def trace(workload: Workload) -> Trace:
    """The workload as the simulator takes it."""
    ids = BlockIds()
    return Trace(
        tuple(
            TraceRequest(
                each.at,
                each.prompt_tokens,
                max(1, each.output_tokens),
                tuple(map(ids.named, each.blocks)),
            )
            for each in workload.requests
        ),
        BLOCK_TOKENS,
    )


def render(found: dict[Run, Report]) -> str:
    """Markdown: a table a case, the last row ours over the best rival."""
    parts = []
    for case in dict.fromkeys(run.case for run in found):
        reports = {run.policy: report for run, report in found.items() if run.case == case}
        lines = [f"### {case.title}, real scheduler", "", f"| policy | {' | '.join(MEASURES)} |"]
        lines.append("|---" * (len(MEASURES) + 1) + "|")
        for name, report in reports.items():
            cells = (f"{measure(report):.3g}" for _, measure in MEASURES.values())
            lines.append(f"| {name} | {' | '.join(cells)} |")
        shares = ratios(reports)
        if shares:
            cells = (f"{shares[name]:.2f}" if name in shares else "" for name in MEASURES)
            lines.append(f"| ours / best rival | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def ratios(reports: dict[str, Report]) -> dict[str, float]:
    """By measure, ours over the best of the rivals', each measure's own; none where one is
    missing."""
    rivals = [report for name, report in reports.items() if name != OURS]
    if not rivals or OURS not in reports:
        return {}
    found = {}
    for name, (sense, measure) in MEASURES.items():
        if sense:
            best = max(sense * measure(report) for report in rivals) * sense
            found[name] = measure(reports[OURS]) / best if best else float("nan")
    return found


def to_json(found: dict[Run, Report]) -> list[dict[str, Any]]:
    """Every run."""
    return [
        {"case": run.case.title, "policy": run.policy, **report.as_dict()}
        for run, report in found.items()
    ]
