"""Blocks are moved bit for bit, whole, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.gpu.block_copy import PAIRS, block_copy
from kernels.gpu.block_gather import block_gather, block_scatter


def pool_of(blocks: int, dtype: torch.dtype, dim: int = 16) -> Tensor:
    """[blocks, layers, 2, kv_heads, block_size, dim] of any bits, NaN among them."""
    shape = (blocks, 3, 2, 1, 16, dim * dtype.itemsize)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator())
    return bits.view(dtype)


def same(actual: Tensor, expected: Tensor) -> bool:
    one, other = (tensor.contiguous().view(torch.uint8).flatten() for tensor in (actual, expected))
    return torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_copies(dtype: torch.dtype, count: int) -> None:
    pool = pool_of(12, dtype)
    expected = pool.clone()
    pairs = [(2 + i, 7 + i) for i in range(count)]
    for source, target in pairs:
        expected[target] = pool[source]
    block_copy(pool, torch.tensor(pairs))
    assert same(pool, expected)


@pytest.mark.parametrize(
    "pairs", [[(1, 2), (2, 3), (3, 4)], [(1, 2), (2, 1)], [(1, 2), (1, 3), (3, 1)]]
)
def test_all_sources_are_read_before_any_target_is_written(pairs: list[tuple[int, int]]) -> None:
    pool = pool_of(5, torch.bfloat16, dim=40)
    before = pool.clone()
    block_copy(pool, torch.tensor(pairs))
    for source, target in pairs:
        assert same(pool[target], before[source])


def test_as_many_pairs_as_a_launch_takes() -> None:
    pool = pool_of(PAIRS + 1, torch.float8_e4m3fn)
    before = pool.clone()
    pairs = torch.arange(PAIRS)[:, None] + torch.tensor([0, 1])
    block_copy(pool, pairs)
    assert same(pool[1:], before[:-1])
    assert same(pool[0], before[0])
    with pytest.raises(ValueError, match=r"^pairs: 33 are more than 32"):
        block_copy(pool, torch.zeros(PAIRS + 1, 2, dtype=torch.int64))


@pytest.mark.parametrize("dim", [16, 88, 200])
def test_gather_and_scatter(dim: int) -> None:
    pool = pool_of(9, torch.bfloat16, dim)
    before = pool.clone()
    ids = torch.tensor([8, 1, 3, 0])
    staging = torch.full((5, pool[0].numel() * 2), 0xA5, dtype=torch.uint8)
    block_gather(pool, ids, staging)
    assert same(staging[:4], before[ids])
    assert bool((staging[4] == 0xA5).all())
    assert same(pool, before)
    targets = torch.tensor([2, 4, 8, 5])
    expected = before.clone()
    expected[targets] = before[ids]
    block_scatter(staging, targets, pool)
    assert same(pool, expected)


def test_nothing_to_move() -> None:
    pool = pool_of(3, torch.float32)
    before = pool.clone()
    block_copy(pool, torch.empty(0, 2, dtype=torch.int64))
    block_gather(pool, torch.empty(0, dtype=torch.int64), torch.empty_like(pool))
    assert same(pool, before)


def test_what_does_not_fit_is_refused() -> None:
    pool, ids = pool_of(3, torch.float32), torch.tensor([1, 2])
    for name, call in {
        "pool": lambda: block_gather(pool.transpose(0, 1), ids, pool),
        "staging": lambda: block_gather(pool, ids, pool[:, :2].contiguous()),
        "ids": lambda: block_gather(pool, ids.int(), pool),
        "pairs": lambda: block_copy(pool, ids),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}:"):
            call()
    with pytest.raises(ValueError, match=r"^ids: 2 blocks, staging has room for 1"):
        block_scatter(pool[:1], ids, pool)
    with pytest.raises(ValueError, match=r"^pool: blocks of 12 bytes"):
        block_copy(torch.zeros(3, 3), ids[None])
