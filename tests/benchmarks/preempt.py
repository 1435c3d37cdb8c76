"""`make bench-preempt`: what a shortage of KV costs, by mode, victim policy and admission.

Every case serves the same prompts with the embedded model, in process; rounds interleave the
cases, so that a slow spell of the machine falls on all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from replicas.models import loader
from replicas.models.hf_adapter import PagedModel
from replicas.models.sources import resolve
from tests.benchmarks.idleness import Idleness
from tests.benchmarks.preempt_case import UNCONSTRAINED, Case, Load, Outcome, run
from tests.benchmarks.prompts import PromptSource
from tests.benchmarks.workload import Workload

MAX_BUSY = 0.15

_SHORT = Workload("short", 64, 64, prefix_tokens=0, own_tokens=200, new_tokens=64)
_GROWTH = Workload("growth", 64, 64, prefix_tokens=0, own_tokens=40, new_tokens=224)
_LONG = Workload("long", 24, 24, prefix_tokens=0, own_tokens=1500, new_tokens=128)
LOADS = (
    Load("half", _SHORT, kv_tokens=8192),
    Load("quarter", _SHORT, kv_tokens=4096),
    Load("long", _LONG, kv_tokens=24 * 1628 // 2),
    # Most of the KV is output, which nobody knows at admission: what forces preemptions.
    Load("growth", _GROWTH, kv_tokens=64 * 264 // 2),
)
_TINY = Workload("tiny", 8, 8, prefix_tokens=0, own_tokens=40, new_tokens=24)
QUICK = (Load("half", _TINY, kv_tokens=256),)
"""To see whether the benchmark works; its figures mean nothing."""

_COLUMNS = (
    *("mode", "victim", "look-ahead", "tok/s", "share", "spread"),
    *("least preemptions", "swaps", "recomputed", "restored", "p99 stall s"),
)

MODES = ("recompute", "swap", "auto")
POLICIES = ("last_admitted", "priority", "cheapest")
LOOK_AHEADS = ("off", "on")


@dataclass(frozen=True, slots=True)
class Row:
    """A case's runs under one load."""

    load: str
    case: Case
    outcomes: tuple[Outcome, ...]

    @property
    def tokens_per_s(self) -> float:
        return median(outcome.tokens_per_s for outcome in self.outcomes)

    @property
    def spread(self) -> float:
        """(fastest - slowest) / median."""
        speeds = [outcome.tokens_per_s for outcome in self.outcomes]
        return (max(speeds) - min(speeds)) / self.tokens_per_s

    @property
    def least_preemptions(self) -> int:
        """Of any run: whether each of them was short of KV."""
        return min(outcome.preemptions for outcome in self.outcomes)

    @property
    def p99_stall_s(self) -> float:
        """Of the preempted choices of all runs."""
        stalls = sorted(stall for outcome in self.outcomes for stall in outcome.stalls_s)
        return stalls[min(len(stalls) - 1, int(0.99 * len(stalls)))] if stalls else 0.0


def cases(
    policies: Sequence[str], modes: Sequence[str], look_aheads: Sequence[str]
) -> Iterator[Case]:
    """Each mode with the first policy; the other policies with the last mode."""
    yield UNCONSTRAINED
    for look_ahead in (each == "on" for each in look_aheads):
        for mode in modes:
            yield Case(mode, policies[0], look_ahead)
        for policy in policies[1:]:
            yield Case(modes[-1], policy, look_ahead)


def measure(
    load: Load, model: PagedModel, folder: Path, arguments: argparse.Namespace
) -> list[Row]:
    """Rows of one load, the unconstrained one first.

    Raises:
        AssertionError: preemption changed a token (float32 only: in bfloat16 near ties may fall
            otherwise).
    """
    outcomes: dict[Case, list[Outcome]] = {}
    source = PromptSource(folder, seed=1)
    for number in range(1, arguments.repeat + 1):
        prompts = source.take(load.workload)
        for case in cases(arguments.policy, arguments.mode, arguments.look_ahead):
            begin = time.monotonic()
            outcome = run(case, load, model, prompts, swap_gib=arguments.swap_space)
            outcomes.setdefault(case, []).append(outcome)
            _say(
                f"{load.name}, round {number}: {case.title}: {outcome.tokens_per_s:.1f} tok/s, "
                f"{outcome.preemptions} preemptions, {time.monotonic() - begin:.0f} s"
            )
            if model.spec.dtype == "float32":
                first = outcomes[UNCONSTRAINED][-1]
                assert outcome.token_ids == first.token_ids, f"{case.title} changed a token"
    return [Row(load.name, case, tuple(found)) for case, found in outcomes.items()]


def table(load: Load, rows: Sequence[Row]) -> str:
    """Markdown. Swaps and tokens are those of the last run."""
    base = rows[0].tokens_per_s
    workload = load.workload
    lines = [
        f"### {load.name}: {workload.requests} x ({workload.own_tokens} + {workload.new_tokens})",
        "",
        f"{load.kv_tokens} tokens of KV, {load.kv_tokens / load.needed_tokens:.0%} of the need",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---" * len(_COLUMNS) + "|",
    ]
    for row in rows:
        case, last = row.case, row.outcomes[-1]
        free = case == UNCONSTRAINED
        cells = (
            case.mode,
            "" if free else case.policy,
            "" if free else ("on" if case.look_ahead else "off"),
            f"{row.tokens_per_s:.1f}",
            f"{row.tokens_per_s / base:.2f}",
            f"{row.spread:.0%}",
            str(row.least_preemptions),
            str(last.swaps),
            str(last.recomputed_tokens),
            str(last.restored_tokens),
            f"{row.p99_stall_s:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Exits with status 2 where an option is refused."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.preempt", description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=cores, help=f"default: {cores}")
    parser.add_argument("--repeat", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument(
        "--load", action="append", choices=[load.name for load in LOADS], help="default: all"
    )
    parser.add_argument("--mode", action="append", choices=MODES, help="default: all")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="default: all")
    parser.add_argument(
        "--look-ahead", action="append", choices=LOOK_AHEADS, help="default: off and on"
    )
    parser.add_argument("--swap-space", type=float, default=2.0, help="GiB (default: 2)")
    parser.add_argument("--quick", action="store_true", help="a tiny load, to see that it works")
    parser.add_argument("--force", action="store_true", help="measure on a busy box as well")
    parser.add_argument("--json", type=Path, help="write all outcomes there too")
    arguments = parser.parse_args()
    arguments.mode = arguments.mode or MODES
    arguments.policy = arguments.policy or POLICIES
    arguments.look_ahead = arguments.look_ahead or LOOK_AHEADS
    return arguments


def main() -> int:
    """0; 1 where the box is not idle."""
    arguments = parse()
    idleness = Idleness.look(2.0)
    if idleness.busy > MAX_BUSY and not arguments.force:
        print(f"bench-preempt: the box is {idleness}; --force measures all the same")
        return 1
    torch.set_num_threads(arguments.threads)
    folder = resolve("embedded", progress=_say)
    model = loader.load(folder, arguments.dtype, "cpu")
    loads = QUICK if arguments.quick else LOADS
    print(f"{arguments.dtype}, {arguments.threads} threads, box {idleness} before\n")
    found: dict[str, list[Row]] = {}
    for load in loads:
        if arguments.load is None or load.name in arguments.load:
            found[load.name] = measure(load, model, folder, arguments)
            print(table(load, found[load.name]), end="\n\n", flush=True)
    if arguments.json is not None:
        rows = [asdict(row) for rows in found.values() for row in rows]
        for row in rows:
            for outcome in row["outcomes"]:
                del outcome["token_ids"]
        arguments.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
