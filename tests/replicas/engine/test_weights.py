"""Draws by inverting cumulative sums of whole numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replicas.engine import weights
from tests.replicas.engine import sampling_reference as reference

LARGEST = 1 - 2.0**-53
Draw = Callable[[Tensor, Tensor], Tensor]
WAYS: list[Draw] = [weights.draw, weights.draw_wide]


@settings(max_examples=80, deadline=None)
@given(
    row=st.lists(st.sampled_from([0, 1, 3, 2**20 + 1, 2**34]), min_size=1, max_size=700),
    uniform=st.one_of(st.floats(0, LARGEST), st.sampled_from([0.0, 0.5, LARGEST])),
)
def test_draw_inverts_the_cumulative_distribution(row: list[int], uniform: float) -> None:
    if not any(row):
        row[-1] = 1
    wanted = reference.drawn(dict(enumerate(row)), uniform)
    for draw in WAYS:
        found = draw(
            torch.tensor([row], dtype=torch.float32), torch.tensor([uniform], dtype=torch.float64)
        )
        assert found.tolist() == [wanted]


@pytest.mark.parametrize("draw", WAYS)
def test_draws_next_to_every_boundary(draw: Draw) -> None:
    torch.manual_seed(0)
    row = weights.weigh_(torch.rand(600) * -5)
    ends = row.double().cumsum(0)
    below, above = (ends - 0.5) / ends[-1], (ends[:-1] + 0.5) / ends[-1]
    rows = row.repeat(600, 1)
    assert draw(rows, below).tolist() == list(range(600))
    assert draw(rows[1:], above).tolist() == list(range(1, 600))


@pytest.mark.parametrize("draw", WAYS)
def test_largest_uniform_draws_the_last_token_with_weight(draw: Draw) -> None:
    totals = torch.cat((torch.arange(1.0, 2000.0), 2.0 ** torch.arange(35) * 1.25))
    rows = torch.zeros(len(totals), 600)
    rows[:, 300] = totals.round()
    assert set(draw(rows, torch.full((len(rows),), LARGEST, dtype=torch.float64)).tolist()) == {300}


def test_sums_are_exact_for_large_vocabularies() -> None:
    torch.manual_seed(0)
    row = weights.weigh_(torch.rand(1, 2**18) * -20)
    whole = sum(int(weight) for weight in row[0].tolist())
    assert int(row.sum(1, dtype=torch.float64)) == whole
    assert int(row.cumsum(1, dtype=torch.float64)[0, -1]) == whole


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-7, 1.0, 1e6])
def test_weights_are_finite_at_any_temperature(temperature: float) -> None:
    scores = torch.tensor([[3e38, -3e38, 0.0, -torch.inf, 2.9e38]])
    exponents = weights.exponents(scores, scores.amax(1), torch.tensor([temperature]))
    found = weights.weigh_(exponents)[0].tolist()
    assert found[0] == weights.ONE
    assert all(math.isfinite(weight) for weight in found)
    assert found[3] == 0


def test_deepest_exponent_without_weight() -> None:
    assert weights.weigh_(torch.tensor([-weights.DEEPEST])).item() == 0
    assert weights.weigh_(torch.tensor([-weights.DEEPEST + 0.3])).item() == 1
