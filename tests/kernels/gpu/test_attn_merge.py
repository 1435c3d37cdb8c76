"""Partial results of softmax over parts, merged."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kernels.gpu.attn_merge import PARTS, attn_merge
from tests.kernels.attention_case import relative_error
from tests.kernels.gpu.step_case import NAN

HEADS, DIM = 2, 80


@pytest.mark.parametrize("slope", [-3.0, 3.0], ids=["falling", "rising"])
def test_parts_weigh_what_their_sums_say(slope: float) -> None:
    """In more parts than are read at a time, of sums that span many powers of two."""
    counts = (2 * PARTS + 5, 1, PARTS)
    generator = torch.Generator().manual_seed(0)
    partials = torch.randn(sum(counts), HEADS, DIM, generator=generator)
    lse = torch.randn(sum(counts), HEADS, generator=generator)
    lse += slope * torch.arange(sum(counts))[:, None]
    bounds = torch.tensor([0, *counts]).cumsum(0)
    expected = []
    for first, last in pairwise(bounds):
        share = (lse[first:last].double() * torch.log(torch.tensor(2.0))).softmax(0)
        expected.append((share[..., None] * partials[first:last].double()).sum(0))
    output = torch.full((len(counts), HEADS, DIM), NAN)
    attn_merge(partials, lse, bounds.int(), output)
    assert relative_error(output, torch.stack(expected)) < 1e-6


def test_a_row_without_partials_is_zero_and_one_of_sinks_alone_too() -> None:
    partials = torch.full((1, 2, 64), 3.0)
    lse = torch.zeros(1, 2)
    row_parts = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    for sinks in (None, torch.tensor([0.0, -torch.inf])):
        output = torch.full((3, 2, 64), NAN)
        attn_merge(partials, lse, row_parts, output, sinks=sinks)
        assert (output[[0, 2]] == 0).all()
        assert (output[1, 1] == 3).all()
        assert (output[1, 0] == (3 if sinks is None else 1.5)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partials": torch.zeros(1, 3, 64)}, "differ in heads or value_dim"),
        ({"row_parts": torch.zeros(3, dtype=torch.int32)}, r"row_parts is \[2\] int32"),
        ({"sinks": torch.zeros(3)}, r"sinks are \[2\]"),
        ({"output": torch.zeros(1, 64, 2).transpose(1, 2)}, "contiguous"),
    ],
    ids=["partials", "row_parts", "sinks", "output"],
)
def test_shapes_that_do_not_agree_are_refused(
    changes: dict[str, torch.Tensor], message: str
) -> None:
    arguments = {
        "partials": torch.zeros(1, 2, 64),
        "lse": torch.zeros(1, 2),
        "row_parts": torch.zeros(2, dtype=torch.int32),
        "output": torch.zeros(1, 2, 64),
    }
    with pytest.raises(ValueError, match=message):
        attn_merge(**{**arguments, **changes})
