"""What all columns do with their system: warm it up, then carry out the runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import astuple
from typing import Any

from tests.benchmarks.figures import Served
from tests.benchmarks.plan import Plan, Run, Say

Serve = Callable[[Run], list[Served]]
Start = Callable[[Plan], AbstractContextManager[Serve]]
"""Starts a system and stops it again."""


class NotInstalledError(RuntimeError):
    """The system is not there; the message says what is missing."""


def measure(start: Start, plan: Plan, say: Say) -> dict[str, Any]:
    """Each run's requests as `Served` tuples.

    Raises:
        RuntimeError: a request got fewer or more tokens than it asked for, so that the
            figures would not compare.
    """
    measured = []
    say("starting")
    with start(plan) as serve:
        if plan.warm_up is not None:
            say("warming up")
            serve(plan.warm_up)
        for run in plan.runs:
            say(run.workload.title)
            served = serve(run)
            _check(run, served)
            measured.append([astuple(s) for s in served])
        say("stopping")
    return {"runs": measured}


def _check(run: Run, served: list[Served]) -> None:
    got = [s.tokens for s in served]
    wanted = [run.workload.new_tokens] * len(run.prompts)
    if got != wanted:
        raise RuntimeError(f"{run.workload.name}: asked for {wanted} tokens, got {got}")
