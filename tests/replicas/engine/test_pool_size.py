"""How many blocks there are, and how long a choice may get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from replicas.config import EngineConfig
from replicas.engine import pool_size
from replicas.engine.device_memory import DeviceMemory
from replicas.engine.device_side import largest_steps
from replicas.engine.kv_pool import block_bytes
from replicas.engine.pool_size import PoolSizeError
from replicas.engine.step_inputs import StepInputs
from tests.replicas.engine.test_kv_pool import SPEC

GIB = 2**30
BLOCK_GIB = block_bytes(SPEC, 64, torch.float32) / GIB


def config(**values: Any) -> EngineConfig:
    return EngineConfig(**values)


def test_the_override_is_exact_on_any_device() -> None:
    for measure in (None, lambda: pytest.fail("there is no need to measure")):
        assert pool_size.num_blocks(config(num_gpu_blocks_override=7), SPEC, measure) == 7


def test_a_cpu_pool_fills_its_memory_with_the_reserved_block_in_it() -> None:
    for blocks in (2, 3, 1000):
        room = config(kv_cache_memory_gib=BLOCK_GIB * (blocks + 0.5))
        assert pool_size.num_blocks(room, SPEC) == blocks - 1
    bf16 = config(kv_cache_memory_gib=BLOCK_GIB * 10, kv_cache_dtype="bfloat16")
    assert pool_size.num_blocks(bf16, SPEC) == 19


def test_no_room_for_a_block_names_the_sizes() -> None:
    tight = config(kv_cache_memory_gib=BLOCK_GIB * 1.5)
    with pytest.raises(PoolSizeError, match=r"kv_cache_memory_gib .* has no room for a KV block"):
        pool_size.num_blocks(tight, SPEC)


def test_a_gpu_pool_takes_what_weights_and_activations_leave() -> None:
    block = block_bytes(SPEC, 64, torch.float32)
    memory = DeviceMemory(100 * block, weights=30 * block, activations=9 * block, others=block)
    used = config(gpu_memory_utilization=0.75)
    assert pool_size.num_blocks(used, SPEC, lambda: memory) == 75 - 30 - 9 - 1 - 1
    assert pool_size.num_blocks(used, SPEC, lambda: replace(memory, weights=63 * block)) == 1


def test_a_gpu_without_room_is_told_what_takes_it() -> None:
    memory = DeviceMemory(80 * GIB, weights=70 * GIB, activations=5 * GIB, others=GIB // 2)
    with pytest.raises(
        PoolSizeError,
        match=r"gpu_memory_utilization 0\.9 of 80\.00 GiB is 72\.00 GiB; weights take 70\.00 GiB, "
        r"activations 5\.00 GiB, the driver and others 0\.50 GiB; what is left, -3\.50 GiB, has no "
        r"room for a KV block of",
    ):
        pool_size.num_blocks(config(), SPEC, lambda: memory)


def test_the_largest_steps_have_all_tokens_and_rows() -> None:
    settings = config(block_size=16, max_num_batched_tokens=150, max_num_seqs=20)
    prefill, decode = largest_steps(settings, SPEC)
    assert prefill.num_tokens == 150
    assert [len(item.token_ids) for item in prefill.scheduled] == [64, 64, 22]
    assert len({item.key for item in prefill.scheduled}) == 3
    inputs = StepInputs(prefill.scheduled)
    assert set(inputs.logit_rows) == set(range(150)), "all logits are needed"
    assert len(decode.scheduled) == decode.num_tokens == 24
    for item in (*prefill.scheduled, *decode.scheduled):
        assert set(item.blocks) == {1}
        assert len(item.blocks) * 16 >= item.start + len(item.token_ids)


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
