"""The command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.column import PEERS, Column
from tests.benchmarks.workload import Workload

_DESCRIPTION = """\
Measure Quire on the embedded model, in process and over HTTP, beside transformers, in one
run. Each system runs in a process of its own on the same prompts."""
_EPILOG = f"""\
environment:
  PEERS  more columns, separated by commas: {", ".join(PEERS)}. NAME=PYTHON names the
         interpreter that has it installed, where that is not this one: such an environment
         also needs aiohttp (vllm) or optimum-cli (openvino).
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Exits with status 2 where an option is refused."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the weights; auto is bfloat16 where the CPU has it (default: auto)",
    )
    parser.add_argument(
        "--threads",
        type=_positive,
        default=cores,
        metavar="N",
        help=f"compute threads of each system (default: all cores, {cores})",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="WORKLOAD/COLUMN",
        help="measure this only; either part alone will do, and it can be given several times",
    )
    parser.add_argument(
        "--repeat", type=_positive, default=1, metavar="N", help="report medians of N runs"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default: 1)")
    parser.add_argument(
        "--quick", action="store_true", help="tiny workloads, to see whether everything works"
    )
    parser.add_argument("--force", action="store_true", help="measure on a busy box as well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args(argv)


def select(
    only: Sequence[str], workloads: Sequence[Workload], columns: Sequence[Column]
) -> frozenset[tuple[str, str]]:
    """The (workload, column) pairs that --only leaves.

    Raises:
        ValueError: it names something that does not exist.
    """
    known = {w.name for w in workloads} | {c.name for c in columns}
    wanted = [frozenset(filter(None, spec.split("/"))) for spec in only or [""]]
    for name in frozenset().union(*wanted) - known:
        raise ValueError(f"--only: {name!r} is not known; there are {', '.join(sorted(known))}")
    pairs = [(w.name, c.name) for w in workloads for c in columns]
    return frozenset(pair for pair in pairs if any(parts <= set(pair) for parts in wanted))


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is refused; allowed: a whole number from 1")
    return number
