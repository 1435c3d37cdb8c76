from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.block_source import BlockSource
from kernels.pool_layout import stored_transposed, transposed_keys

CPU = torch.device("cpu")


def pool(transposed: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    memory = torch.arange(20 * 2 * 4 * 3, dtype=torch.float32).view(20, 2, 4, 3).to(dtype)
    return transposed_keys(memory) if transposed else memory


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [[5, 3, 4, 3], [2, 19, 7, 2], [6]])
def test_numbers_find_the_blocks(blocks: list[int], dtype: torch.dtype, transposed: bool) -> None:
    source = BlockSource(np.array(blocks), 2.0, CPU)
    stored = pool(transposed, dtype)
    for _ in range(2):
        read = source.read(stored, torch.float32)
        assert len(read) == source.count
        assert torch.equal(read[torch.from_numpy(source.numbers)], stored[blocks].float())
        assert stored_transposed(read) == transposed


def test_a_dense_range_is_read_in_place_and_a_sparse_one_gathered() -> None:
    stored = pool(False)
    dense = BlockSource(np.array([3, 5, 4, 7]), 2.0, CPU)
    assert dense.read(stored, torch.float32).data_ptr() == stored[3].data_ptr()
    assert dense.count == 5
    sparse = BlockSource(np.array([1, 19]), 2.0, CPU)
    assert sparse.count == 2
    anything = BlockSource(np.array([1, 19]), math.inf, CPU)
    assert anything.read(stored, torch.float32).data_ptr() == stored[1].data_ptr()
    assert anything.count == 19


def test_copies_share_one_buffer_that_fits_the_widest() -> None:
    source = BlockSource(np.array([1, 19]), 2.0, CPU)
    narrow = source.read(pool(False)[..., :2].contiguous(), torch.float32)
    wide = source.read(pool(False), torch.float32)
    again = source.read(pool(False)[..., :2].contiguous(), torch.float32)
    assert wide.shape == (2, 2, 4, 3)
    assert narrow.shape == again.shape == (2, 2, 4, 2)
    assert again.data_ptr() == wide.data_ptr()
