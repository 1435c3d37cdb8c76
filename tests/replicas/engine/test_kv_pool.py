"""The pool's layouts, its copies and what its blocks hold at the start."""

from __future__ import annotations

import pytest
import torch

from kernels.pool_layout import stored_transposed
from replicas.engine.kv_pool import KVPool, block_bytes
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


def make_pool(device: str = "cpu", dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(SPEC, num_blocks=6, block_size=4, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


def test_elsewhere_a_block_is_one_extent_over_all_layers() -> None:
    pool = make_pool("meta")
    first, second = pool.layer(0)[0][:2]
    stride = second.storage_offset() - first.storage_offset()
    assert stride * pool.dtype.itemsize == pool.block_bytes
    ends = [blocks[0].storage_offset() for index in range(3) for blocks in pool.layer(index)]
    assert ends == list(range(0, stride, 2 * 4 * 5))


def test_a_block_takes_the_bytes_of_all_layers_keys_and_values() -> None:
    assert block_bytes(SPEC, 4, torch.float32) == 3 * 2 * 2 * 4 * 5 * 4
    assert make_pool(dtype=torch.bfloat16).block_bytes == 3 * 2 * 2 * 4 * 5 * 2


def test_layers_keys_and_values_do_not_overlap() -> None:
    pool = make_pool()
    tensors = [blocks for index in range(SPEC.num_layers) for blocks in pool.layer(index)]
    assert all(bool((blocks == 0).all()) for blocks in tensors)
    for value, blocks in enumerate(tensors):
        blocks.fill_(value)
    for value, blocks in enumerate(tensors):
        assert bool((blocks == value).all())


def numbered_pool() -> KVPool:
    """Every block holds its own number, in all layers."""
    pool = make_pool()
    for index in range(SPEC.num_layers):
        for blocks in pool.layer(index):
            blocks.copy_(torch.arange(7.0).reshape(7, 1, 1, 1).expand_as(blocks))
    return pool


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
    pairs: list[tuple[int, int]], expected: list[int]
) -> None:
    pool = numbered_pool()
    pool.copy(pairs)
    for index in range(SPEC.num_layers):
        for blocks in pool.layer(index):
            assert [block.unique().tolist() for block in blocks] == [[n] for n in expected]
