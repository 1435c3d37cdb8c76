"""Runs a job in a process of its own, so that no two teams of threads share the cores."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

from tests.benchmarks.plan import Plan, Say

ROOT = Path(__file__).parents[2]
_DEADLINE_S = 3600.0
_STOP_S = 90.0
_LOG_TAIL = 3000


class JobError(RuntimeError):
    """The job failed; the message ends with what it printed last."""


def run_job(module: str, python: str, plan: Plan, say: Say) -> dict[str, Any]:
    """What the module's `report` returned, see worker.py.

    Raises:
        JobError: it failed or took more than an hour.
    """
    name = module.rpartition(".")[2]
    files = [plan.scratch / f"{name}-{what}" for what in ("plan.json", "result.json", "log")]
    plan_file, result, log = files
    plan.write(plan_file)
    command = [python, "-m", "tests.benchmarks.worker", module, str(plan_file), str(result)]
    threads = str(plan.threads)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            cwd=ROOT,
            env=env,
            text=True,
            start_new_session=True,  # Ctrl-C comes to us alone, and from us to the job
        )
    deadline = threading.Timer(_DEADLINE_S, process.terminate)
    deadline.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip())
        status = process.wait()
    finally:
        deadline.cancel()
        _stop(process)
    if status:
        text = log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:].strip()
        raise JobError(f"{name} ended with status {status}:\n{text}")
    report: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return report


def _stop(process: subprocess.Popen[str]) -> None:
    """Let a job that is still running, because we were interrupted, clean up after itself."""
    if process.poll() is None:
        process.terminate()
        process.wait(_STOP_S)
