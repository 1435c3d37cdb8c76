"""Compiles many launches in parallel processes, cold, and leaves nothing behind."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kernels.aot.compiling import Compiled, Target, compile_launch

if TYPE_CHECKING:
    from kernels.gpu.launch import Launch

ROOT = Path(__file__).parents[3]
CLEARED = ("TRITON_", "PTXAS_OPTIONS", "DISABLE_PTXAS_OPT")
"""Beginnings of the names of variables that change what is compiled."""


@dataclass(frozen=True, slots=True)
class Job:
    """A launch among those listed for the target's architecture, by its place."""

    index: int
    key: str
    target: Target


@cache
def launches(source: str, arch: int) -> Sequence[Launch]:
    """What the function `source`, written `module:function`, lists. Launches cannot be pickled:
    each process makes them for itself."""
    module, function = source.split(":")
    return tuple(getattr(importlib.import_module(module), function)(arch))


def compile_all(source: str, jobs: Iterable[Job], workers: int) -> Iterator[tuple[Job, Compiled]]:
    """In the order in which they end. The environment must be clean."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_compile, source, job): job for job in jobs}
        for done in as_completed(running):
            yield running[done], done.result()


def _compile(source: str, job: Job) -> Compiled:
    # A folder of its own, as an intermediate form or two of each variant would fill the disk.
    with tempfile.TemporaryDirectory(dir=os.environ["TRITON_CACHE_DIR"]) as folder:
        shared, os.environ["TRITON_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"], folder
        try:
            launch = launches(source, job.target.arch)[job.index]
            if launch.key != job.key:
                raise RuntimeError("kernels were edited while they were compiled: start again")
            return compile_launch(launch, job.target)
        finally:
            os.environ["TRITON_CACHE_DIR"] = shared


@contextmanager
def clean_environment() -> Iterator[dict[str, str]]:
    """Variables with an empty cache for Triton, without the interpreter; the cache goes after."""
    folder = tempfile.mkdtemp(prefix="quire-triton-")
    try:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(CLEARED)}
        yield kept | {"TRITON_CACHE_DIR": folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_apart(module: str, *arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """`python -m module` in a clean environment."""
    with clean_environment() as environment:
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
