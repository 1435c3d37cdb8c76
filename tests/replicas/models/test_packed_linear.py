"""Packed linear layers compute what F.linear computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from replicas.models import packed_linear
from replicas.models.packed_linear import PackedLinear, pack_linears, packable_dtype

pytestmark = pytest.mark.skipif(
    packable_dtype(torch.float32) is None, reason="torch cannot pack weights on this CPU"
)


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 80).requires_grad_(False)


@pytest.mark.parametrize("rows", [(), (1,), (1, 1), (1, 7), (33,), (1, 0)])
def test_float32(layer, rows) -> None:
    x = torch.randn(*rows, 48)
    packed = PackedLinear(layer.weight, layer.bias, torch.float32)
    torch.testing.assert_close(packed(x), layer(x), rtol=1e-5, atol=1e-5)


def test_float32_rows_do_not_depend_on_their_batch(layer) -> None:
    x = torch.randn(64, 48)
    packed = PackedLinear(layer.weight, None, torch.float32)
    whole = packed(x)
    for rows in (1, 2, 5, 16, 33):
        assert torch.equal(packed(x[:rows]), whole[:rows])


def test_bfloat16_in_float32_rounds_once(layer) -> None:
    layer = layer.bfloat16()
    x = torch.randn(9, 48).bfloat16()
    packed = PackedLinear(layer.weight, layer.bias, torch.float32)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    product = packed(x)
    assert product.dtype == torch.bfloat16
    error = (product.double() - exact).abs()
    assert bool((error <= exact.abs() * 2**-8 + 1e-6).all())  # half a unit in the last place


def test_a_single_row_takes_the_weight_that_was_kept(layer) -> None:
    packed = PackedLinear(layer.weight, layer.bias, torch.float32, row_weight=layer.weight)
    x = torch.randn(1, 1, 48)
    assert torch.equal(packed(x), layer(x))


def test_linears_of_a_model_are_replaced_and_tied_ones_stay_tied() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(50, 24), "head": nn.Linear(24, 50, bias=False)})
    model["head"].weight = model["embed"].weight
    x = torch.randn(3, 24)
    expected = model["head"](x)
    pack_linears(model.requires_grad_(False))
    assert type(model["head"]) is PackedLinear
    torch.testing.assert_close(model["head"](x), expected)
    assert [name for name, _ in model.named_parameters()] == ["embed.weight"]


@pytest.fixture
def fresh_probe():
    packable_dtype.cache_clear()
    yield
    packable_dtype.cache_clear()


@pytest.mark.usefixtures("fresh_probe")
@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_emulated_bfloat16_is_widened(native, dtype, monkeypatch) -> None:
    monkeypatch.setattr(packed_linear, "has_native_bf16", lambda device: native)
    monkeypatch.setattr(packed_linear, "_works", lambda dtype: True)
    assert packable_dtype(torch.bfloat16) == dtype
    assert packable_dtype(torch.float32) == torch.float32


@pytest.mark.usefixtures("fresh_probe")
def test_without_the_private_operators_a_model_stays_as_it_is(monkeypatch) -> None:
    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(packed_linear, "_pack", missing)
    model = nn.Sequential(nn.Linear(8, 8))
    pack_linears(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.usefixtures("fresh_probe")
def test_wrong_products_are_found_out(monkeypatch) -> None:
    monkeypatch.setattr(packed_linear, "_pack", lambda weight: weight.flip(0).to_mkldnn())
    monkeypatch.setattr(
        packed_linear, "_multiply", lambda x, packed, bias: F.linear(x, packed.to_dense(), bias)
    )
    assert packable_dtype(torch.float32) is None
