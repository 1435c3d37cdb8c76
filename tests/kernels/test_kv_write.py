from __future__ import annotations

import pytest
import torch

from kernels.attention_batch import AttentionBatch, Segment
from kernels.kv_write import kv_write
from kernels.pool_layout import stored_transposed, transposed_keys
from kernels.reference import write_reference

SEGMENTS = [Segment(3, 6, [4, 2, 6]), Segment(7, 1, [1, 5]), Segment(0, 1, [3])]


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [5, 8])
def test_only_the_slots_of_new_tokens_change(
    dim: int, dtype: torch.dtype, transposed: bool
) -> None:
    memory = torch.randn(8, 3, 4, 8).to(dtype)
    blocks = transposed_keys(memory) if transposed else memory
    new = torch.randn(8, 3, dim)
    expected = write_reference(new.to(dtype), blocks, SEGMENTS)
    batch = AttentionBatch.build(SEGMENTS, 4, "cpu")
    kv_write(new, blocks, batch.token_blocks, batch.token_offsets)
    assert torch.equal(blocks, expected)


def test_transposed_keys_are_the_same_memory_and_whole_blocks_copy() -> None:
    memory = torch.randn(4, 2, 3, 5)
    keys = transposed_keys(memory)
    assert keys.shape == memory.shape
    assert stored_transposed(keys)
    assert not stored_transposed(memory)
    before = keys[1].clone()
    memory[3] = memory[1]
    assert torch.equal(keys[3], before)
