"""Runs sections, each in a child process that may hang or die without harm to the rest.

Children are forked, so that importing torch is paid for once. That needs a parent which has never
touched the GPU: a CUDA context does not survive a fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.gpu_check import records
from tests.gpu_check.records import End, Recorder
from tests.gpu_check.results import NOT_AVAILABLE, OK, Results, SectionResult
from tests.gpu_check.rig import Rig, UnavailableError

_FORK = multiprocessing.get_context("fork")
_DRY_SLACK = 4
"""Deadlines are for a machine with a GPU, and a CPU may be busy with something else."""
_LEAST_S = 2.0
"""Less than this is not worth a start."""
_REAPING_S = 5.0
"""A killed child may have to wait for its kernel to end. The others do not wait for it."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the check with a deadline of its own."""

    name: str
    run: Callable[[Rig], None]
    deadline_s: float
    items: tuple[str, ...] = ()
    """Each must have a row in the end."""
    peer: bool = False
    """Others' kernels only: what goes wrong with them is told, but fails nothing."""

    @property
    def file_name(self) -> str:
        return re.sub(r"\W+", "-", self.name)


def in_module(module: str) -> Callable[[Rig], None]:
    """`tests.gpu_check.sections.<module>.run`, imported where it runs."""

    def run(rig: Rig) -> None:
        importlib.import_module(f"tests.gpu_check.sections.{module}").run(rig)

    return run


def run_all(
    sections: Iterable[Section],
    rig: Rig,
    folder: Path,
    total_s: float,
    tell: Callable[[SectionResult], None],
) -> Results:
    """All sections in order, within `total_s` together; `folder`/results.json is up to date after
    each. What one measured about the machine is known to the next."""
    results = Results(rig.dry)
    end = time.monotonic() + total_s
    for section in sections:
        slack = _DRY_SLACK if rig.dry else 1
        seconds = min(slack * section.deadline_s, end - time.monotonic())
        if seconds < _LEAST_S:
            result = _result(section, "no time left", 0.0, "", ())
        else:
            result = run_one(section, replace(rig, facts=results.facts), folder, seconds)
        results.sections.append(result)
        results.write(folder / "results.json")
        tell(result)
    return results


def run_one(section: Section, rig: Rig, folder: Path, seconds: float) -> SectionResult:
    """One section, ended by force after `seconds`. Never raises for what the section does."""
    path = folder / f"{section.file_name}.jsonl"
    recorder = Recorder(path)
    begin = time.monotonic()
    limited = replace(rig, recorder=recorder, deadline=begin + seconds)
    log = folder / f"{section.file_name}.log"
    child = _FORK.Process(target=_work, args=(section, limited, log), daemon=False)
    child.start()
    try:
        child.join(seconds)
        overran = child.is_alive()
    finally:
        _end_group(child.pid)
    child.join(_REAPING_S)
    took = time.monotonic() - begin
    found = records.read(path)
    if found and isinstance(found[-1], End) and not overran:
        return _result(section, found[-1].status, took, found[-1].detail, found[:-1])
    if overran:
        return _result(section, "overran", took, f"its deadline was {seconds:.0f} s", found)
    return _result(section, "crashed", took, _cause(child.exitcode), found)


def _work(section: Section, rig: Rig, log: Path) -> None:
    """What the child does."""
    os.setpgid(0, 0)  # so that what it starts ends with it
    with log.open("w", buffering=1) as file:
        for stream in (1, 2):  # what compilers and libraries print goes around sys.stdout
            os.dup2(file.fileno(), stream)
        faulthandler.enable(file)
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            rig.recorder.add(_attempt(section, rig))


def _attempt(section: Section, rig: Rig) -> End:
    try:
        section.run(rig)
    except UnavailableError as error:
        return End(NOT_AVAILABLE, str(error))
    except ModuleNotFoundError as error:
        traceback.print_exc()
        package = (error.name or str(error)).partition(".")[0]
        return End(NOT_AVAILABLE, f"{package} is not installed")
    except BaseException as error:  # noqa: BLE001 - told to the parent, which goes on
        traceback.print_exc()
        return End("failed", f"{type(error).__name__}: {error}".strip())
    return End(OK)


def _end_group(pid: int | None) -> None:
    """Kill what is left of the child and of what it started."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _cause(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def _result(
    section: Section, status: str, seconds: float, detail: str, found: Sequence[records.Record]
) -> SectionResult:
    return SectionResult(
        section.name, status, seconds, detail, tuple(found), section.items, section.peer
    )
