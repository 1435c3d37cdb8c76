"""The gate against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.silu_mul import silu_mul
from kernels.reference_elementwise import silu_mul_reference

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [1, 100, 1024, 1536])
def test_against_float64(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    gate_up = (torch.randn(2, 3, 2 * width) * 3).to(dtype)
    expected = silu_mul_reference(gate_up)
    actual = silu_mul(gate_up)
    assert actual.dtype == dtype
    assert actual.shape == (2, 3, width)
    assert (actual.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


def test_far_from_zero() -> None:
    gate_up = torch.tensor([[-80.0, 1e4, -0.0, 2.0, 2.0, 2.0]])
    assert silu_mul(gate_up).tolist() == [[pytest.approx(0, abs=1e-30), 2e4, 0.0]]


def test_what_does_not_fit_is_refused() -> None:
    assert silu_mul(torch.ones(0, 8)).shape == (0, 4)
    with pytest.raises(ValueError, match=r"^gate_up:"):
        silu_mul(torch.ones(2, 7))
    with pytest.raises(ValueError, match=r"^gate_up:"):
        silu_mul(torch.ones(8, 8)[:, :4])
