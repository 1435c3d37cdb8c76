"""The pool's layouts, its copies and what its blocks hold at the start."""

from __future__ import annotations

import pytest
import torch

from kernels.fp8 import FP8
from kernels.pool_layout import stored_transposed
from replicas.engine.kv_pool import KVPool, block_bytes
from replicas.models.kv_scales import KVScales
from replicas.models.spec import ModelSpec

SPEC = ModelSpec(
    architecture="TestForCausalLM",
    num_layers=3,
    num_heads=4,
    kv_heads=2,
    head_dim=5,
    vocab_size=10,
    max_position=64,
    eos_token_ids=(),
    dtype="float32",
    fingerprint="",
    num_parameters=0,
)
DEVICES = ["cpu", "meta"]
"""`meta` stands for any device that is not the CPU: its tensors have shapes and strides only."""


SCALES = KVScales(*torch.rand(2, 3, 2).add(0.1))


def make_pool(device: str = "cpu", dtype: torch.dtype = torch.float32) -> KVPool:
    scales = SCALES if dtype == FP8 else None
    return KVPool(SPEC, num_blocks=6, block_size=4, dtype=dtype, device=device, scales=scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_is_block_major_on_every_device(device: str, dtype: torch.dtype) -> None:
    pool = make_pool(device, dtype)
    for index in range(SPEC.num_layers):
        for blocks in pool.layer(index):
            assert (blocks.shape, blocks.dtype) == ((7, 2, 4, 5), dtype)


def test_on_the_cpu_a_layer_is_contiguous_with_its_keys_transposed() -> None:
    pool = make_pool()
    for index in range(SPEC.num_layers):
        keys, values = pool.layer(index)
        assert stored_transposed(keys)
        assert values.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_elsewhere_a_block_is_one_extent_over_all_layers(dtype: torch.dtype) -> None:
    pool = make_pool("meta", dtype)
    first, second = pool.layer(0)[0][:2]
    stride = second.storage_offset() - first.storage_offset()
    assert stride * pool.dtype.itemsize == pool.block_bytes
    ends = [blocks[0].storage_offset() for index in range(3) for blocks in pool.layer(index)]
    assert ends == list(range(0, stride, 2 * 4 * 5))


def test_a_block_takes_the_bytes_of_all_layers_keys_and_values() -> None:
    assert block_bytes(SPEC, 4, torch.float32) == 3 * 2 * 2 * 4 * 5 * 4
    assert make_pool(dtype=torch.bfloat16).block_bytes == 3 * 2 * 2 * 4 * 5 * 2
    assert make_pool(dtype=FP8).block_bytes == 3 * 2 * 2 * 4 * 5


def test_a_layer_has_its_own_scales_in_an_fp8_pool_only() -> None:
    assert make_pool().scales(0) is make_pool(dtype=torch.bfloat16).scales(0) is None
    pool = make_pool(dtype=FP8)
    for index in range(SPEC.num_layers):
        found = pool.scales(index)
        assert found is not None
        assert torch.equal(torch.stack(found), torch.stack((SCALES.keys, SCALES.values))[:, index])
    for dtype, given in ((FP8, None), (torch.bfloat16, SCALES)):
        with pytest.raises(ValueError, match="scales are for an e4m3 pool"):
            KVPool(SPEC, num_blocks=1, block_size=4, dtype=dtype, device="cpu", scales=given)


def test_layers_keys_and_values_do_not_overlap() -> None:
    pool = make_pool()
    tensors = [blocks for index in range(SPEC.num_layers) for blocks in pool.layer(index)]
    assert all(bool((blocks == 0).all()) for blocks in tensors)
    for value, blocks in enumerate(tensors):
        blocks.fill_(value)
    for value, blocks in enumerate(tensors):
        assert bool((blocks == value).all())


def numbered_pool(dtype: torch.dtype = torch.float32) -> KVPool:
    """Every block holds its own number, in all layers."""
    pool = make_pool(dtype=dtype)
    for index in range(SPEC.num_layers):
        for blocks in pool.layer(index):
            blocks.copy_(torch.arange(7.0).reshape(7, 1, 1, 1).expand_as(blocks))
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], [0, 1, 2, 3, 4, 5, 6]),
        ([(1, 2)], [0, 1, 1, 3, 4, 5, 6]),
        ([(1, 2), (2, 3), (3, 1)], [0, 3, 1, 2, 4, 5, 6]),
        ([(5, 1), (5, 2), (6, 5)], [0, 5, 5, 3, 4, 6, 6]),
    ],
    ids=["none", "one", "a cycle", "a source of two is a target too"],
)
def test_all_sources_are_read_before_any_target_is_written(
    pairs: list[tuple[int, int]], expected: list[int], dtype: torch.dtype
) -> None:
    pool = numbered_pool(dtype)
    pool.copy(pairs)
    for index in range(SPEC.num_layers):
        for blocks in pool.layer(index):
            assert [block.float().unique().tolist() for block in blocks] == [[n] for n in expected]
