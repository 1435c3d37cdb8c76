"""The element-wise ops of a model's modules, by Triton's kernels."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kernels import variants
from kernels.gpu import rms_norm, silu_mul
from kernels.gpu.launch import Launch


class TritonElementwise:
    """`kernels.elementwise.Elementwise`: the kernels take rows, modules any leading dimensions.

    Raises VariantError where a variant would be needed that is not listed.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounded: bool) -> Tensor:
        """[..., width] -> [..., width]."""
        rows = _rows(x)
        _require_norm(rows, weight, None, rounded=rounded)
        return rms_norm.rms_norm(rows, weight, eps, rounded=rounded).view(x.shape)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounded: bool
    ) -> tuple[Tensor, Tensor]:
        """[..., width] twice -> [..., width] twice."""
        rows, added = _rows(x), _rows(residual)
        _require_norm(rows, weight, added, rounded=rounded)
        normed, total = rms_norm.rms_norm(rows, weight, eps, residual=added, rounded=rounded)
        return normed.view(x.shape), total.view(x.shape)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[..., 2 * width] -> [..., width]."""
        _require(silu_mul.launch(dtype=gate_up.dtype, width=gate_up.shape[-1] // 2), gate_up.device)
        return silu_mul.silu_mul(_rows(gate_up)).view(*gate_up.shape[:-1], -1)


def _require_norm(rows: Tensor, weight: Tensor, residual: Tensor | None, *, rounded: bool) -> None:
    launch = rms_norm.launch(
        dtype=rows.dtype,
        weight_dtype=weight.dtype,
        width=rows.shape[1],
        x_stride=rows.stride(0),
        residual_stride=None if residual is None else residual.stride(0),
        rounded=rounded,
    )
    _require(launch, rows.device)


@cache
def _require(launch: Launch, device: torch.device) -> None:
    variants.require_all((launch,), device)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
