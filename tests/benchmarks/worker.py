"""`python -m tests.benchmarks.worker MODULE PLAN RESULT`: one job in a process of its own.

The module's `report(plan, say)` gives what goes into RESULT as JSON. Lines about progress go
to standard output, whatever libraries print to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path

from tests.benchmarks.measure import NotInstalledError
from tests.benchmarks.plan import Plan


def main() -> int:
    module, plan, result = sys.argv[1:]
    signal.signal(signal.SIGTERM, _stop)
    progress = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        report = importlib.import_module(module).report(
            Plan.read(Path(plan)), lambda line: print(line, file=progress)
        )
    except NotInstalledError as error:
        report = {"not_installed": str(error)}
    Path(result).write_text(json.dumps(report), encoding="utf-8")
    return 0


def _stop(*_: object) -> None:
    """Let `finally` blocks do their work, undisturbed: a job must leave nothing running."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
