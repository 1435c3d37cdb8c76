"""How many blocks there are, and how long a choice may get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from replicas.config import EngineConfig
from replicas.engine import pool_size
from replicas.engine.kv_pool import block_bytes
from replicas.engine.pool_size import PoolSizeError
from tests.replicas.engine.test_kv_pool import SPEC

GIB = 2**30
BLOCK_GIB = block_bytes(SPEC, 64, torch.float32) / GIB


def config(**values: Any) -> EngineConfig:
    return EngineConfig(**values)


def test_the_override_is_exact_on_any_device() -> None:
    for device in ("cpu", "cuda"):
        assert pool_size.num_blocks(config(num_gpu_blocks_override=7), SPEC, device) == 7


def test_a_cpu_pool_fills_its_memory_with_the_reserved_block_in_it() -> None:
    for blocks in (2, 3, 1000):
        room = config(kv_cache_memory_gib=BLOCK_GIB * (blocks + 0.5))
        assert pool_size.num_blocks(room, SPEC, "cpu") == blocks - 1
    bf16 = config(kv_cache_memory_gib=BLOCK_GIB * 10, kv_cache_dtype="bfloat16")
    assert pool_size.num_blocks(bf16, SPEC, "cpu") == 19


def test_no_room_for_a_block_names_the_sizes() -> None:
    tight = config(kv_cache_memory_gib=BLOCK_GIB * 1.5)
    with pytest.raises(PoolSizeError, match=r"kv_cache_memory_gib .* no room for a KV block of"):
        pool_size.num_blocks(tight, SPEC, "cpu")


def test_a_gpu_pool_takes_what_the_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    block = block_bytes(SPEC, 64, torch.float32)
    memory = {"free": 60 * block, "total": 100 * block}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (memory["free"], memory["total"]))
    used = config(gpu_memory_utilization=0.75)
    assert pool_size.num_blocks(used, SPEC, "cuda") == 60 - 25 - 1
    memory["free"] = 26 * block
    with pytest.raises(PoolSizeError, match=r"gpu_memory_utilization 0\.75 .* are taken"):
        pool_size.num_blocks(used, SPEC, "cuda")


def test_the_kv_dtype_is_the_models_unless_told_otherwise() -> None:
    half = replace(SPEC, dtype="bfloat16")
    assert pool_size.kv_dtype(config(), SPEC) is torch.float32
    assert pool_size.kv_dtype(config(), half) is torch.bfloat16
    assert pool_size.kv_dtype(config(kv_cache_dtype="float32"), half) is torch.float32


@pytest.mark.parametrize(
    ("asked", "blocks", "expected"),
    [(None, 1000, SPEC.max_position), (None, 3, 48), (20, 1000, 20), (60, 3, 60)],
    ids=["the model's context", "the pool", "as configured", "as configured, beyond the pool"],
)
def test_max_model_len(asked: int | None, blocks: int, expected: int) -> None:
    asks = config(block_size=16, max_model_len=asked)
    assert pool_size.max_model_len(asks, SPEC, blocks) == expected


def test_more_than_the_models_context_is_refused() -> None:
    with pytest.raises(PoolSizeError, match="max_model_len 65 exceeds the model's context of 64"):
        pool_size.max_model_len(config(max_model_len=65), SPEC, 1000)
