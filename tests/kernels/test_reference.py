"""The oracle itself, against dense attention in float64 and what is known by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kernels.attention_batch import Segment
from kernels.reference import paged_attention_reference, write_reference
from tests.kernels.attention_case import AttentionCase


def test_whole_prefill_equals_dense_attention() -> None:
    problem = AttentionCase([(0, 40)], heads=6, kv_heads=2, dim=16, block_size=8).build()
    dense = F.scaled_dot_product_attention(
        problem.query.transpose(0, 1).double(),
        problem.key.transpose(0, 1).double(),
        problem.value.transpose(0, 1).double(),
        is_causal=True,
        enable_gqa=True,
    ).transpose(0, 1)
    torch.testing.assert_close(problem.expected(), dense, rtol=0, atol=1e-12)


def test_window_sees_that_many_keys_and_no_more() -> None:
    keys = torch.zeros(3, 1, 4, 1)
    values = torch.arange(12.0).view(3, 1, 4, 1)
    one = torch.zeros(1, 1, 1)
    output = paged_attention_reference(
        one, one, torch.full((1, 1, 1), 7.0), keys, values, [Segment(5, 1, [2, 1])],
        scale=1.0, window=3,
    )  # fmt: skip
    # Positions 3, 4 and 5: block 2 slot 3, block 1 slot 0, the new value.
    assert output.item() == pytest.approx((11 + 4 + 7) / 3)


def test_sink_takes_a_share_and_soft_cap_bounds_scores() -> None:
    query, key = torch.full((1, 1, 1), 1e4), torch.full((1, 1, 1), 1e4)
    value, pool = torch.full((1, 1, 1), 2.0), torch.zeros(2, 1, 1, 1)
    output = paged_attention_reference(
        query, key, value, pool, pool, [Segment(0, 1, [1])],
        scale=1.0, soft_cap=3.0, sinks=torch.tensor([1.0]),
    )  # fmt: skip
    assert output.item() == pytest.approx(2 * math.exp(3) / (math.exp(3) + math.exp(1)))


def test_writing_leaves_the_given_pool_alone() -> None:
    pool = torch.zeros(3, 1, 2, 1)
    written = write_reference(torch.ones(2, 1, 1), pool, [Segment(1, 2, [2, 1])])
    assert written[:, 0, :, 0].tolist() == [[0, 0], [1, 0], [0, 1]]
    assert not pool.any()
