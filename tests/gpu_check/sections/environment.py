"""What machine this is, and the most that it can do."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from itertools import pairwise

import numpy as np
import torch

from tests.gpu_check import rig as names
from tests.gpu_check.items import CEILINGS
from tests.gpu_check.rig import Rig
from tests.gpu_check.targets import NOTHING, rate
from tests.gpu_check.timing import by_wall, replayed

_PACKAGES = ("triton", "transformers", "flashinfer-python", "xformers", "pydantic")
_MIB = 2**20


def run(rig: Rig) -> None:
    """Facts, then ceilings; each kind of copy is a row of its own."""
    _describe(rig)
    _device_bandwidth(rig)
    _matmul(rig)
    _host_bandwidth(rig)


def _describe(rig: Rig) -> None:
    rig.fact("python", platform.python_version())
    rig.fact("torch", torch.__version__)
    rig.fact("numpy", np.__version__)
    for package in _PACKAGES:
        rig.fact(package, _version(package))
    if rig.dry:
        rig.fact("device", "cpu, Triton's interpreter")
        return
    properties = torch.cuda.get_device_properties(0)
    rig.fact("device", properties.name)
    rig.fact("capability", f"{properties.major}.{properties.minor}")
    rig.fact("multiprocessors", properties.multi_processor_count)
    rig.fact("memory, GiB", round(properties.total_memory / 2**30, 1))
    rig.fact("driver and clocks", _nvidia_smi())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _nvidia_smi() -> str:
    query = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__}"
    return done.stdout.splitlines()[0]


def _device_bandwidth(rig: Rig) -> None:
    size = _MIB // 16 if rig.dry else 2048 * _MIB
    sources = [torch.empty(size // 4, device=rig.device).normal_() for _ in range(3)]
    targets = [torch.empty_like(source) for source in sources]
    copies = [lambda t=t, s=s: t.copy_(s) for t, s in zip(targets, sources, strict=True)]
    copied = 2 * size / replayed(rig, copies).median_s
    _ceiling(rig, CEILINGS[0], names.COPY, copied, 1e9, "GB/s")
    # Which of torch's reductions comes closest to the memory's rate differs between versions.
    sums = [lambda s=s: s.sum() for s in sources]
    maxima = [lambda s=s: s.amax() for s in sources]
    dots = [lambda a=a, b=b: torch.dot(a, b) for a, b in pairwise(sources)]
    seconds = [replayed(rig, calls).median_s for calls in (sums, maxima)]
    seconds.append(replayed(rig, dots).median_s / 2)
    _ceiling(rig, CEILINGS[1], names.READ, size / min(seconds), 1e9, "GB/s")


def _matmul(rig: Rig) -> None:
    side = 64 if rig.dry else 8192
    pairs = [
        [torch.empty(side, side, device=rig.device).normal_().to(torch.bfloat16) for _ in range(2)]
        for _ in range(3)
    ]
    outputs = [torch.empty_like(a) for a, _ in pairs]
    calls = [
        lambda a=a, b=b, o=o: torch.mm(a, b, out=o)
        for (a, b), o in zip(pairs, outputs, strict=True)
    ]
    _ceiling(
        rig, CEILINGS[2], names.MATMUL, 2 * side**3 / replayed(rig, calls).median_s, 1e12, "TFLOP/s"
    )


def _host_bandwidth(rig: Rig) -> None:
    size = _MIB // 16 if rig.dry else 256 * _MIB
    hosts = [
        torch.empty(size, dtype=torch.uint8, pin_memory=not rig.dry).fill_(7) for _ in range(2)
    ]
    devices = [torch.ones(size, dtype=torch.uint8, device=rig.device) for _ in range(2)]

    def out() -> None:
        hosts[0].copy_(devices[0], non_blocking=True)

    def back() -> None:
        devices[1].copy_(hosts[1], non_blocking=True)

    for item, name, call in (
        (CEILINGS[3], names.TO_HOST, out),
        (CEILINGS[4], names.FROM_HOST, back),
    ):
        _ceiling(rig, item, name, size / by_wall(rig, call, 10).median_s, 1e9, "GB/s")

    def both() -> None:
        if rig.dry:
            out(), back()
            return
        side = _side_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out()
        back()
        torch.cuda.current_stream().wait_stream(side)

    figure = 2 * size / by_wall(rig, both, 10).median_s
    rig.recorder.add(rate(CEILINGS[5], figure / 1e9, "GB/s", None, NOTHING, dry=rig.dry))


_streams: list[torch.cuda.Stream] = []


def _side_stream() -> torch.cuda.Stream:
    if not _streams:
        _streams.append(torch.cuda.Stream())
    return _streams[0]


def _ceiling(rig: Rig, item: str, name: str, figure: float, scale: float, unit: str) -> None:
    rig.fact(name, figure)
    rig.recorder.add(rate(item, figure / scale, unit, None, NOTHING, dry=rig.dry))
