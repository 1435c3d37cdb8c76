"""How many KV blocks a replica has room for."""

from __future__ import annotations

import torch

from replicas.config import EngineConfig
from replicas.engine.kv_pool import RESERVED_BLOCKS, block_bytes
from replicas.models.spec import ModelSpec

_GIB = 2**30


class PoolSizeError(ValueError):
    """There is not room for a single block; the message names the sizes."""


def kv_dtype(config: EngineConfig, spec: ModelSpec) -> torch.dtype:
    """The pool's element type; `auto` takes the model's."""
    name = spec.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def num_blocks(config: EngineConfig, spec: ModelSpec, device: str) -> int:
    """Usable blocks: the override, else what fits `kv_cache_memory_gib` (CPU), or what
    `gpu_memory_utilization` leaves beside the loaded weights (CUDA).

    Raises:
        PoolSizeError: not one block fits.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    size = block_bytes(spec, config.block_size, kv_dtype(config, spec))
    if device == "cpu":
        room = config.kv_cache_memory_gib * _GIB
        source = f"kv_cache_memory_gib {config.kv_cache_memory_gib:g}"
    else:
        free, total = torch.cuda.mem_get_info()
        room = free - (1.0 - config.gpu_memory_utilization) * total
        source = (
            f"gpu_memory_utilization {config.gpu_memory_utilization:g} of {total / _GIB:.1f} GiB, "
            f"of which {(total - free) / _GIB:.1f} GiB are taken,"
        )
    blocks = int(room // size) - RESERVED_BLOCKS
    if blocks < 1:
        raise PoolSizeError(
            f"{source} leaves no room for a KV block of {size / 2**20:.1f} MiB "
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
