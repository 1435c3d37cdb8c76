"""`quire simulate`: what a trace would do to a cluster, policy by policy."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster import simulate_plot, simulate_table
from cluster.config_errors import ConfigError
from replicas.config import EngineConfig
from replicas.core.preemption.preempter import PreemptionMode
from replicas.core.scheduler import SchedulerConfig
from router.placement import POLICIES, Placer
from router.policies.policy import PlacementPolicy
from router.policies.power_of_two import PowerOfTwo
from router.simulator import trace_file
from router.simulator.hardware import HARDWARE
from router.simulator.machine import Machine
from router.simulator.measurements import Limits, Report
from router.simulator.models import MODELS
from router.simulator.replica import ReplicaSettings
from router.simulator.simulation import Simulation
from router.simulator.trace import Trace, TraceError


@dataclass(frozen=True, slots=True)
class Result:
    """What one policy made of the trace."""

    policy: str
    report: Report
    wall_s: float
    """That the simulation itself took."""

    def as_dict(self, run: dict[str, Any]) -> dict[str, Any]:
        """For JSON; `run` says what was simulated."""
        return {"policy": self.policy, "run": run, **self.report.as_dict(), "wall_s": self.wall_s}


def run(options: argparse.Namespace) -> int:
    """Simulate each of the policies and print a table, or JSON; the exit status.

    Raises:
        ConfigError: an option or the trace is refused; its message names what is allowed.
    """
    if options.plot:
        simulate_plot.check()
    trace = _read(options)
    settings = _settings(options, trace.block_size)
    description = _describe(options, trace, settings)
    results = [_simulate(name, trace, settings, options) for name in options.policies]
    if options.json:
        text = json.dumps([result.as_dict(description) for result in results], indent=2)
    else:
        limits = Limits(options.ttft_limit, options.itl_limit)
        text = simulate_table.render(description, limits, results)
    sys.stdout.write(text + "\n")
    if options.plot:
        simulate_plot.draw(options.plot, results)
    return 0


def _read(options: argparse.Namespace) -> Trace:
    try:
        trace = trace_file.read(options.trace, options.block_size)
    except TraceError as error:
        raise ConfigError([f"--trace: {error}"]) from error
    if options.limit_requests:
        trace = trace.first(options.limit_requests)
    return trace.faster(options.speed)


def _settings(options: argparse.Namespace, block_size: int) -> ReplicaSettings:
    machine = Machine.fitting(MODELS[options.model], HARDWARE[options.gpu])
    kv_tokens = options.kv_tokens or machine.kv_tokens
    num_blocks = kv_tokens // block_size
    if num_blocks < 1:
        raise ConfigError(
            [f"--kv-tokens: {kv_tokens} is refused; allowed: a block of {block_size} at the least"]
        )
    if options.max_num_batched_tokens < options.max_num_seqs:
        given, least = options.max_num_batched_tokens, options.max_num_seqs
        problem = f"{given} is refused; allowed: --max-num-seqs ({least}) upwards"
        raise ConfigError([f"--max-num-batched-tokens: {problem}"])
    return ReplicaSettings(
        machine=machine,
        scheduling=_scheduling(options, min(machine.model.max_position, num_blocks * block_size)),
        block_size=block_size,
        num_blocks=num_blocks,
        host_blocks=machine.host_blocks(options.swap_space, block_size),
        spill_tokens=EngineConfig().spill_prefix_tokens,
    )


def _scheduling(options: argparse.Namespace, max_model_len: int) -> SchedulerConfig:
    """The engine's defaults, but for what the options say."""
    engine = EngineConfig()
    return SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=max_model_len,
        min_progress_tokens=engine.min_progress_tokens,
        preemption_mode=PreemptionMode(engine.preemption_mode),
        look_ahead=engine.admission == "look_ahead",
        watermark=engine.watermark,
        hysteresis=engine.preemption_hysteresis,
        overcommit=engine.overcommit,
        restore_patience_s=engine.restore_patience_s,
    )


def _describe(
    options: argparse.Namespace, trace: Trace, settings: ReplicaSettings
) -> dict[str, Any]:
    return {
        "trace": str(options.trace),
        "requests": len(trace.requests),
        "prompt_tokens": trace.num_prompt_tokens,
        "output_tokens": trace.num_output_tokens,
        "duration_s": trace.duration_s,
        "speed": options.speed,
        "seed": options.seed,
        "replicas": options.replicas,
        "model": options.model,
        "gpu": options.gpu,
        "replicas_per_node": options.replicas_per_node,
        "gpus_a_replica": settings.machine.degree,
        "block_size": settings.block_size,
        "kv_tokens": settings.num_blocks * settings.block_size,
        "host_tokens": settings.host_blocks * settings.block_size,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "feed_delay_s": options.feed_delay,
        "ttft_limit_s": options.ttft_limit,
        "itl_limit_s": options.itl_limit,
    }


def _simulate(
    policy: str, trace: Trace, settings: ReplicaSettings, options: argparse.Namespace
) -> Result:
    began = time.perf_counter()
    simulation = Simulation(
        trace,
        settings,
        Placer(_policy(policy, options.seed)),
        num_replicas=options.replicas,
        replicas_a_node=options.replicas_per_node,
        feed_delay_s=options.feed_delay,
        progress=_progress(policy, len(trace.requests)),
    )
    report = simulation.run().report(Limits(options.ttft_limit, options.itl_limit))
    if sys.stderr.isatty():
        _overwrite("")
    return Result(policy, report, time.perf_counter() - began)


def _policy(name: str, seed: int) -> PlacementPolicy:
    """The policy, all of whose draws follow from `seed`."""
    return PowerOfTwo(random.Random(seed)) if name == "power_of_two" else POLICIES[name]()


def _progress(policy: str, total: int) -> Callable[[int], None]:
    """Says on a terminal, in a line that overwrites itself, how far the simulation is."""
    if not sys.stderr.isatty():
        return lambda _: None
    shown = -1

    def show(ended: int) -> None:
        nonlocal shown
        percent = 100 * ended // total
        if percent > shown:
            shown = percent
            _overwrite(f"quire: {policy}: {percent} % of {total} requests")

    return show


def _overwrite(text: str) -> None:
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()
