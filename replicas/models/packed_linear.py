"""Linear layers for CPUs, their weights laid out once for oneDNN's matrix multiplication.

The operators are private to torch, so they appear in this file only, and are used only where
a probe at load finds that they work.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replicas.models.native_bf16 import has_native_bf16

_PACKED_FOR_ROWS = 16
"""Rows the layout is chosen for: as good as any from 2 to 512, unlike a layout for one row."""
_MAX_KEPT_BYTES = 1 << 30
"""A model's weights are kept beside the packed ones, for single rows, up to this size."""


class PackedLinear(nn.Module):
    """`F.linear` over a packed weight; inputs are [..., in_features].

    The arithmetic is done in `compute_dtype`, which is the weight's own or float32, and the
    result is in the input's. A bfloat16 layer computed in float32 has the contract of a
    bfloat16 matrix unit: exact products, sums in float32, one rounding at the end.

    `row_weight` is a weight as it was, for inputs of one row: they wait for memory, and a
    bfloat16 weight is half as much to read as the float32 one it is packed as.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        compute_dtype: torch.dtype,
        row_weight: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = _pack(weight.to(compute_dtype))
        self._packed_bias = None if bias is None else bias.to(compute_dtype)
        self._compute_dtype = compute_dtype
        self._row_weight = row_weight
        self._row_bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self._row_weight is not None and x.numel() == self.in_features:
            return F.linear(x, self._row_weight, self._row_bias)
        return _multiply(x.to(self._compute_dtype), self._packed, self._packed_bias).to(x.dtype)


def pack_linears(model: nn.Module) -> None:
    """Replace the linear layers of a model on CPU, as far as its dtype can be packed here.

    A tied weight is packed too, which costs a copy of it: the embedding still reads the
    original. Other weights are freed, unless they are small and a single row gains by them.
    """
    linears = [
        (name, module) for name, module in model.named_modules() if type(module) is nn.Linear
    ]
    if not linears:
        return
    dtype = linears[0][1].weight.dtype
    compute_dtype = packable_dtype(dtype)
    if compute_dtype is None:
        return
    size = sum(linear.weight.nbytes for _, linear in linears)
    keep = size <= _MAX_KEPT_BYTES and compute_dtype != dtype
    for name, linear in linears:
        row_weight = linear.weight if keep else None
        packed = PackedLinear(linear.weight, linear.bias, compute_dtype, row_weight)
        model.set_submodule(name, packed)


@cache
def packable_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype in which weights of `dtype` are packed on this CPU; None where they are not.

    bfloat16 that the CPU only emulates takes ten times as long as float32.
    """
    emulated = dtype == torch.bfloat16 and not has_native_bf16("cpu")
    compute_dtype = torch.float32 if emulated else dtype
    return compute_dtype if _works(compute_dtype) else None


def _works(dtype: torch.dtype) -> bool:
    """Whether packing is there for `dtype` and gives what F.linear gives."""
    weight = torch.linspace(-1, 1, 64 * 32).reshape(64, 32).to(dtype)
    x = torch.linspace(-1, 1, 3 * 32).reshape(3, 32).to(dtype)
    try:
        product = _multiply(x, _pack(weight), None)
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(product, F.linear(x, weight), rtol=1e-2, atol=1e-2)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
