"""How many KV blocks a replica has room for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.fp8 import FP8
from replicas.config import EngineConfig
from replicas.engine.device_memory import DeviceMemory
from replicas.engine.kv_pool import RESERVED_BLOCKS, block_bytes
from replicas.models.spec import ModelSpec

_GIB = 2**30
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8_e4m3": FP8}


class PoolSizeError(ValueError):
    """There is not room for a single block; the message names the sizes."""


def kv_dtype(config: EngineConfig, spec: ModelSpec) -> torch.dtype:
    """The pool's element type; `auto` takes the model's."""
    name = spec.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    return _DTYPES[name]


def num_blocks(
    config: EngineConfig, spec: ModelSpec, measure: Callable[[], DeviceMemory] | None = None
) -> int:
    """Usable blocks: the override, else what fits `kv_cache_memory_gib` (CPU), or what
    `gpu_memory_utilization` leaves beside weights and activations (where there is a GPU to
    `measure`, which takes seconds).

    Raises:
        PoolSizeError: not one block fits.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    size = block_bytes(spec, config.block_size, kv_dtype(config, spec))
    if measure is None:
        room = config.kv_cache_memory_gib * _GIB
        source = f"kv_cache_memory_gib {config.kv_cache_memory_gib:g}"
    else:
        memory = measure()
        room = memory.room(config.gpu_memory_utilization)
        source = memory.explain(config.gpu_memory_utilization)
    blocks = int(room // size) - RESERVED_BLOCKS
    if blocks < 1:
        raise PoolSizeError(
            f"{source} has no room for a KV block of {size / 2**20:.1f} MiB "
            f"({config.block_size} tokens) beside the reserved one"
        )
    return blocks


def max_model_len(config: EngineConfig, spec: ModelSpec, blocks: int) -> int:
    """Tokens a choice may reach: as configured, else the model's context, at most the pool.

    Raises:
        PoolSizeError: more is configured than the model's positions allow.
    """
    if config.max_model_len is None:
        return min(spec.max_position, blocks * config.block_size)
    if config.max_model_len > spec.max_position:
        raise PoolSizeError(
            f"max_model_len {config.max_model_len} exceeds the model's context of "
            f"{spec.max_position} tokens"
        )
    return config.max_model_len
