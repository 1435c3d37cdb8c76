"""Compiles what the sections launch, and every variant that the engine can ask for, with this
machine's compiler and all of its cores. What follows finds it in Triton's cache."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from typing import TYPE_CHECKING

from tests.gpu_check.items import COMPILED
from tests.gpu_check.rig import Rig
from tests.gpu_check.targets import exact

if TYPE_CHECKING:
    from kernels.gpu.launch import Launch
    from tests.gpu_check.warm_up import Part

_DRY_ARCH = 90
_MOST_WORKERS = 32


def run(rig: Rig) -> None:
    """Two rows: how much of either did not compile. In a dry run, the last of each is tried."""
    # The processes are started anew: they import the kernels to compile, not to interpret.
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as folder:
        if rig.dry:
            os.environ["TRITON_CACHE_DIR"] = folder
        workers = 1 if rig.dry else min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
        context = get_context("spawn")
        with ProcessPoolExecutor(workers, context, _prepare, (rig.dry,)) as pool:
            counts = pool.submit(_counts, rig.dry).result()
            for item, compile_, count in zip(COMPILED, (_part, _variant), counts, strict=True):
                indices = range(count)[-1:] if rig.dry else range(count)
                _compile_all(rig, pool, item, compile_, indices)


def _compile_all(
    rig: Rig,
    pool: ProcessPoolExecutor,
    item: str,
    compile_: Callable[[bool, int], str],
    indices: range,
) -> None:
    begin, errors = time.monotonic(), []
    for done in as_completed([pool.submit(compile_, rig.dry, index) for index in indices]):
        if error := done.result():
            print(error, flush=True)
            errors.append(error)
    note = f"in {time.monotonic() - begin:.0f} s"
    if errors:
        note += f"; {errors[0].splitlines()[0][:200]}"
    rig.recorder.add(exact(item, len(errors), len(indices), note=note))


def _prepare(dry: bool) -> None:
    """A process that compiles. Several at a time would otherwise use all cores each."""
    import torch

    from tests.gpu_check.compile_only import stop_launches, without_device

    torch.set_num_threads(1)
    stop_launches()
    if dry:
        without_device(_DRY_ARCH)


def _counts(dry: bool) -> tuple[int, int]:
    return len(_parts(dry)), len(_listed(_arch(dry)))


def _part(dry: bool, index: int) -> str:
    """What is wrong with that part of what sections launch; nothing where it compiles."""
    try:
        _parts(dry)[index](_rig(dry))
    except Exception as error:  # noqa: BLE001 - reported, and the others are compiled
        return f"{_parts(dry)[index]}: {_text(error)}"
    return ""


def _variant(dry: bool, index: int) -> str:
    """The same of that variant of the engine's."""
    from tests.gpu_check.compile_only import compile_listed

    launch = _listed(_arch(dry))[index]
    try:
        compile_listed(launch)
    except Exception as error:  # noqa: BLE001 - reported, and the others are compiled
        return f"{launch.key}: {_text(error)}"
    return ""


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error.__cause__ or error}"


def _rig(dry: bool) -> Rig:
    return Rig(dry, compiling=True)


@cache
def _parts(dry: bool) -> list[Part]:
    from tests.gpu_check.warm_up import parts

    return parts(_rig(dry))


@cache
def _listed(arch: int) -> tuple[Launch, ...]:
    """Launches cannot be pickled: each process makes them for itself."""
    from kernels.variants import variants

    return variants(arch)


def _arch(dry: bool) -> int:
    import torch

    if dry:
        return _DRY_ARCH
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
