"""`make bench-router`: placement policies in two models, and what a decision takes.

The simple model has no scheduler, only queues and caches: its figures can be compared with those
that others got from the same model, and say nothing of a real engine's speed. The second has the
real scheduler in the loop, over a roofline of a GPU: there, only ratios between policies count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.router_model import cases, engines, report
from tests.benchmarks.router_model.decisions import QUICK, STANDARD, Decisions

_QUICK_REQUESTS = 100
"""Enough to see that it works; the figures mean nothing."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Exits with status 2 where an option is refused."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.router", description=__doc__)
    parser.add_argument("--trace", type=Path, help="a conversation trace in Mooncake's format")
    parser.add_argument("--decisions", action="store_true", help="time decisions, too")
    parser.add_argument("--policy", action="append", choices=cases.policies(), help="default: all")
    parser.add_argument("--replays", type=int, default=3, help="of device-only cases (default: 3)")
    parser.add_argument(
        "--requests",
        type=int,
        default=engines.REQUESTS,
        help="with the real scheduler, of each workload; 0 leaves that part out (default: "
        "%(default)s)",
    )
    parser.add_argument("--workers", type=int, default=cores, help=f"processes (default: {cores})")
    parser.add_argument("--quick", action="store_true", help="little of it, to see that it works")
    parser.add_argument("--json", type=Path, help="write all outcomes there too")
    parsed = parser.parse_args(arguments)
    if parsed.trace is None and not parsed.decisions:
        parser.error("--trace FILE, --decisions or both")
    if parsed.trace is not None and not parsed.trace.is_file():
        parser.error(f"--trace: there is no file {parsed.trace}")
    return parsed


def main() -> int:
    """0, whether or not targets are met: those are for the reader."""
    arguments = parse()
    begin = time.monotonic()
    outcome: dict[str, Any] = {}
    if arguments.trace is not None:
        source = cases.Source(arguments.trace, _QUICK_REQUESTS if arguments.quick else None)
        names = arguments.policy or cases.policies()
        replays = 1 if arguments.quick else arguments.replays
        wanted = cases.runs(cases.CASES, names, replays)
        found = cases.run_all(source, wanted, arguments.workers, _say)
        print(report.render(found, judge=not arguments.quick), end="\n\n", flush=True)
        outcome["model"] = report.to_json(found)
        most = min(arguments.requests, _QUICK_REQUESTS if arguments.quick else arguments.requests)
        if most > 0:
            source = cases.Source(arguments.trace, most)
            real = engines.run_all(source, names, arguments.workers, _say)
            print(engines.render(real), end="\n\n", flush=True)
            outcome["engines"] = engines.to_json(real)
    if arguments.decisions:
        times = Decisions(QUICK if arguments.quick else STANDARD, _say).run()
        print(times.render(judge=not arguments.quick), end="\n\n", flush=True)
        outcome["decisions"] = times.to_json()
    _say(f"done in {time.monotonic() - begin:.0f} s")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(outcome, indent=2), encoding="utf-8")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
