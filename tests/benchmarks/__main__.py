"""`make bench`, or `python -m tests.benchmarks --help`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from replicas.models.sources import resolve
from tests.benchmarks import options, table
from tests.benchmarks.bench import Bench, BusyError, Settings
from tests.benchmarks.column import columns
from tests.benchmarks.job import JobError
from tests.benchmarks.plan import Plan
from tests.benchmarks.workload import QUICK, STANDARD

_FAILURE = 1
_USAGE_ERROR = 2


def main() -> int:
    """0; 1 where something could not be measured; 2 for a mistake in the call."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = options.parse(None)
    try:
        with tempfile.TemporaryDirectory(prefix="quire-bench-") as scratch:
            settings = _settings(arguments, Path(scratch))
            results = Bench(settings).run()
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except (BusyError, JobError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return _FAILURE
    print(table.render(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results.to_json(), indent=2), encoding="utf-8")
    return _FAILURE if any(c.problem == "failed" for c in results.columns) else 0


def _settings(arguments: argparse.Namespace, scratch: Path) -> Settings:
    workloads = QUICK if arguments.quick else STANDARD
    systems = columns(os.environ.get("PEERS", ""))
    wanted = options.select(arguments.only, workloads, systems)
    return Settings(
        columns=tuple(c for c in systems if any(c.name == name for _, name in wanted)),
        workloads=workloads,
        wanted=wanted,
        plan=Plan(
            folder=resolve("embedded", progress=lambda line: print(line, file=sys.stderr)),
            dtype=arguments.dtype,
            threads=arguments.threads,
            quick=arguments.quick,
            scratch=scratch,
        ),
        repeat=arguments.repeat,
        seed=arguments.seed,
        force=arguments.force,
    )


if __name__ == "__main__":
    sys.exit(main())
