"""Replaced modules compute what they replace, or are not replaced."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from kernels.elementwise import TorchElementwise
from replicas.models import module_swap
from replicas.models.gated_mlp import GatedMLP, swap_mlps
from replicas.models.norms import RMSNorm, RoundedRMSNorm, swap_norms

GATED = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16}


def swapped(model: nn.Module) -> Counter:
    return Counter(type(module).__name__ for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "norm"),
    [("llama", "rounded"), ("qwen3", "rounded"), ("gemma2", "plain"), ("olmo2", "plain")],
)
def test_norms_keep_their_roundings(model_type, norm, dtype, tiny) -> None:
    model, _ = tiny(model_type, **GATED)
    model = model.to(dtype)
    before = {name: module for name, module in model.named_modules() if "norm" in name}
    swap_norms(model, TorchElementwise())
    expected = RoundedRMSNorm if (norm, dtype) == ("rounded", torch.bfloat16) else RMSNorm
    for name, module in before.items():
        after = model.get_submodule(name)
        assert type(after) is expected
        x = torch.randn(5, module.weight.shape[0]).to(dtype) * 3
        different = (after(x) != module(x)).float().mean()
        assert float(different) < 0.05 if dtype == torch.bfloat16 else True
        torch.testing.assert_close(after(x), module(x))


def test_a_norm_of_another_kind_stays(tiny) -> None:
    model, _ = tiny("llama", **GATED)

    class ShiftedRMSNorm(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.01

    model.model.norm.__class__ = ShiftedRMSNorm
    swap_norms(model, TorchElementwise())
    assert type(model.model.norm) is ShiftedRMSNorm
    assert swapped(model)["RMSNorm"] == 4


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_gated_mlps(model_type, tiny) -> None:
    model, _ = tiny(model_type, **GATED)
    before = model.model.layers[1].mlp
    swap_mlps(model)
    after = model.model.layers[1].mlp
    assert type(after) is GatedMLP
    x = torch.randn(1, 5, 32)
    copy = x.clone()
    torch.testing.assert_close(after(x), before(x))
    assert torch.equal(x, copy)


def test_an_mlp_of_another_kind_stays(tiny) -> None:
    model, _ = tiny("llama", **GATED)

    class ScaledMLP(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model.model.layers[0].mlp.__class__ = ScaledMLP
    swap_mlps(model)
    assert type(model.model.layers[0].mlp) is ScaledMLP
    assert type(model.model.layers[1].mlp) is GatedMLP


def test_swapping_keeps_a_models_logits(tiny) -> None:
    model, _ = tiny("qwen3", **GATED)
    tokens = torch.tensor([[3, 14, 15, 92, 65]])
    with torch.inference_mode():
        expected = model(tokens).logits
        module_swap.swap_for_cpu(model)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    kinds = swapped(model)
    assert (kinds["RMSNorm"], kinds["GatedMLP"], kinds["Linear"]) == (9, 2, 0)
