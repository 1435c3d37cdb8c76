"""Measures the current CUDA device's memory: the only file that asks torch.cuda for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from replicas.engine.device_memory import DeviceMemory


def measure(steps: Sequence[Callable[[], None]]) -> DeviceMemory:
    """Run each of `steps` alone, and count the activations of all together: those of prefill come
    and go, those of captured graphs stay beside them."""
    _settle()
    weights = torch.cuda.memory_allocated()
    activations = 0
    for step in steps:
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        # Reserved, not allocated: what fragments of freed tensors take is taken.
        activations += torch.cuda.max_memory_reserved() - weights
        _settle()
    free, total = torch.cuda.mem_get_info()
    # Only now: the first steps have loaded kernels and libraries.
    others = total - free - torch.cuda.memory_reserved()
    return DeviceMemory(total, weights, activations, others)


def _settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
