"""What the machine is, and how fast it reads and multiplies."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn

from replicas.models.loader import resolve_dtype
from replicas.models.native_bf16 import has_native_bf16
from replicas.models.packed_linear import pack_linears
from tests.benchmarks.plan import Plan, Say

_WIDTH = 2048
"""Of the square weights that are multiplied with."""
_QUICK_WIDTH = 256
_DECODE_ROWS = 64


def report(plan: Plan, say: Say) -> dict[str, Any]:
    """Names, rates, and the model's size in the dtype that is in effect."""
    torch.set_num_threads(plan.threads)
    dtype = resolve_dtype(plan.dtype, "cpu")
    say("reading and multiplying")
    parameters, head = _parameters(plan.folder)
    dtypes = dict.fromkeys((torch.float32, dtype))
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "native_bf16": has_native_bf16("cpu"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": _name(dtype),
        "parameters": parameters,
        "head_parameters": head,
        "weight_bytes": parameters * dtype.itemsize,
        "read_gb_s": _read_gb_s(plan.quick),
        "gemm_gflop_s": {
            _name(each): {
                "large": _gemm_gflop_s(_WIDTH, each, plan.quick),
                "rows_64": _gemm_gflop_s(_DECODE_ROWS, each, plan.quick),
            }
            for each in dtypes
        },
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parameters(folder: Path) -> tuple[int, int]:
    """(all, those of the output projection, which is tied to the embedding)."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
            total += sum(math.prod(shape) for shape in shapes)
    config = json.loads((folder / "config.json").read_text())
    return total, config["vocab_size"] * config["hidden_size"]


def _read_gb_s(quick: bool) -> float:
    memory = torch.ones((32 if quick else 512) * 2**18)
    return memory.nbytes / _fastest(memory.sum, 5) / 1e9


@torch.inference_mode()
def _gemm_gflop_s(rows: int, dtype: torch.dtype, quick: bool) -> float:
    """The best of torch's linear layer and ours, with weights that no cache holds."""
    count = 1 if rows > _DECODE_ROWS else 12
    width = _QUICK_WIDTH if quick else _WIDTH
    layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    layers.to(dtype)
    inputs = torch.rand(rows, width).to(dtype)
    times = 1 if quick else 5
    plain_s = _fastest(lambda: layers(inputs), times)
    pack_linears(layers)
    packed_s = _fastest(lambda: layers(inputs), times)
    return 2 * rows * width * width * count / min(plain_s, packed_s) / 1e9


def _fastest(work: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of so many runs, the first one not counted."""
    work()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)
