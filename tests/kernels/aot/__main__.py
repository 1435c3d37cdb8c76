"""`python -m tests.kernels.aot`: compiles kernels for GPUs that need not be here, and checks them.

Exits with 1 where a variant breaks a rule or takes more than the table says.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kernels.aot import farm, table
from tests.kernels.aot.compiling import Target
from tests.kernels.aot.farm import Job
from tests.kernels.aot.subset import chosen
from tests.kernels.aot.survey import Survey

if TYPE_CHECKING:
    from kernels.gpu.launch import Launch

SOURCE = "kernels.variants:variants"
REPORT_EVERY_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    with farm.clean_environment() as environment:
        os.environ.clear()
        os.environ.update(environment)
        return _check(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.aot", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write what they take to the table")
    parser.add_argument("--subset", action="store_true", help="those that the test suite compiles")
    parser.add_argument("--only", nargs="+", metavar="OP", help="such as attn_decode")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--report", type=Path, help="where to write all results as JSON")
    return parser


def _check(options: argparse.Namespace) -> int:
    import triton

    from kernels.variants import TARGETS, identity

    version = triton.__version__
    listed = {arch: farm.launches(SOURCE, arch) for arch in TARGETS}
    known = table.read(version)
    if known is None and not options.update:
        print(f"resources.json has nothing of triton {version}: sizes are not compared")
    survey = Survey(None if options.update else known)
    _compile(survey, listed, _jobs(listed, options), options.workers)
    if options.update:
        keys = {(identity(launch), arch) for arch in listed for launch in listed[arch]}
        table.write(version, survey.merged(known or {}, keys))
    if options.report:
        survey.write(options.report)
    for target, count in sorted(survey.counts.items()):
        print(f"{target}: {count} compiled")
    print(f"{survey.broken} of {len(survey.findings)} have faults")
    return min(survey.broken, 1)


def _jobs(listed: Mapping[int, Sequence[Launch]], options: argparse.Namespace) -> list[Job]:
    if options.subset:
        jobs = list(chosen(listed))
    else:
        jobs = [
            Job(index, launch.key, Target(arch, aligned))
            for arch, launches in listed.items()
            for index, launch in enumerate(launches)
            for aligned in (True, False)
        ]
    wanted = options.only
    return [job for job in jobs if not wanted or listed[job.target.arch][job.index].op in wanted]


def _compile(
    survey: Survey, listed: Mapping[int, Sequence[Launch]], jobs: list[Job], workers: int
) -> None:
    """Say what is wrong as soon as it is known, and how far it is now and then."""
    started = told = time.monotonic()
    for done, (job, compiled) in enumerate(farm.compile_all(SOURCE, jobs, workers), 1):
        finding = survey.take(listed[job.target.arch][job.index], job.target, compiled)
        for fault in finding.faults:
            print(f"{finding.target}: {finding.key}\n    {fault}", flush=True)
        now = time.monotonic()
        if now - told >= REPORT_EVERY_S or done == len(jobs):
            told = now
            print(f"{done} of {len(jobs)} compiled, {now - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
