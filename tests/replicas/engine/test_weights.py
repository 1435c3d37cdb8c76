"""Probabilities as whole numbers."""

from __future__ import annotations

import math

import pytest
import torch

from replicas.engine import weights


def test_sums_are_exact_for_large_vocabularies() -> None:
    torch.manual_seed(0)
    row = weights.weigh_(torch.rand(1, 2**18) * -20)
    whole = sum(int(weight) for weight in row[0].tolist())
    assert int(row.sum(1, dtype=torch.float64)) == whole
    assert int(row.cumsum(1, dtype=torch.float64)[0, -1]) == whole


@pytest.mark.parametrize("temperature", [weights.COLDEST, 1e-7, 1.0, 1e6])
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
