"""RMS norm against float64, and against torch's, whose place it takes."""

from __future__ import annotations

import pytest
import torch

from kernels.elementwise import TorchElementwise
from kernels.gpu.rms_norm import rms_norm
from kernels.reference_elementwise import rms_norm_reference

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}


@pytest.mark.parametrize("width", [1, 33, 576, 1000, 4096])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rounded", [False, True])
def test_against_float64(width: int, dtype: torch.dtype, rounded: bool) -> None:
    torch.manual_seed(width)
    x = (torch.randn(5, 2 * width) * torch.tensor([1e-3, 1, 30, 0, 1])[:, None]).to(dtype)
    x = x[:, width:]
    weight = torch.randn(width).to(dtype)
    expected = rms_norm_reference(x, weight, 1e-5)
    actual = rms_norm(x, weight, 1e-5, rounded=rounded)
    assert actual.dtype == dtype
    assert (actual.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()
    assert bool((actual[3] == 0).all())


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rounded", [False, True])
def test_a_residual_is_added_and_rounded_first(dtype: torch.dtype, rounded: bool) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(3, 700) * 10).to(dtype), torch.randn(3, 1400).to(dtype)[:, :700]
    weight = torch.randn(700).to(dtype)
    normed, total = rms_norm(x, weight, 1e-6, residual=residual, rounded=rounded)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6, rounded=rounded))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rounds_where_torch_does(dtype: torch.dtype) -> None:
    """Few elements differ, by the last bit; a rounding more or less would be all over them."""
    torch.manual_seed(0)
    x, weight = torch.randn(6, 512).to(dtype), torch.randn(512).to(dtype)
    for scale, rounded in ((weight, False), (weight, True), (1.0 + weight.float(), False)):
        expected = TorchElementwise().rms_norm(x, scale, 1e-6, rounded=rounded)
        actual = rms_norm(x, scale, 1e-6, rounded=rounded)
        bound = {torch.float32: 1e-6, torch.float16: 1e-4}[dtype]
        assert (actual.float() - expected.float()).norm() < bound * expected.float().norm()


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.ones(2, 64), torch.ones(64)
    assert rms_norm(x[:0], weight, 1e-6, rounded=False).shape == (0, 64)
    with pytest.raises(ValueError, match=r"^x: \(2, 2, 32\)"):
        rms_norm(x.view(2, 2, 32), weight, 1e-6, rounded=False)
    with pytest.raises(ValueError, match="width <= 32768"):
        rms_norm(torch.ones(1, 32769), torch.ones(32769), 1e-6, rounded=False)
    with pytest.raises(ValueError, match=r"^weight:"):
        rms_norm(x, weight[:32], 1e-6, rounded=False)
    with pytest.raises(ValueError, match=r"^residual:"):
        rms_norm(x, weight, 1e-6, residual=x.half(), rounded=False)
