"""The element-wise ops of a model's modules, by Triton's kernels."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kernels import variants
from kernels.gpu import rms_norm, silu_mul
from kernels.gpu.attention_shape import device_arch
from kernels.gpu.launch import Launch


class TritonElementwise:
    """`kernels.elementwise.Elementwise`: the kernels take rows, modules any leading dimensions.

    Raises VariantError where a variant would be needed that is not listed.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounded: bool) -> Tensor:
        """[..., width] -> [..., width]."""
        _require_norm(x.dtype, weight.dtype, x.shape[-1], x.device, residual=False, rounded=rounded)
        return rms_norm.rms_norm(_rows(x), weight, eps, rounded=rounded).view(x.shape)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounded: bool
    ) -> tuple[Tensor, Tensor]:
        """[..., width] twice -> [..., width] twice."""
        _require_norm(x.dtype, weight.dtype, x.shape[-1], x.device, residual=True, rounded=rounded)
        normed, total = rms_norm.rms_norm(
            _rows(x), weight, eps, residual=_rows(residual), rounded=rounded
        )
        return normed.view(x.shape), total.view(x.shape)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[..., 2 * width] -> [..., width]."""
        _require_silu(gate_up.dtype, gate_up.shape[-1] // 2, gate_up.device)
        return silu_mul.silu_mul(_rows(gate_up)).view(*gate_up.shape[:-1], -1)


@cache
def _require_norm(
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    width: int,
    device: torch.device,
    *,
    residual: bool,
    rounded: bool,
) -> None:
    launch = rms_norm.launch(
        dtype=dtype,
        weight_dtype=weight_dtype,
        width=width,
        x_stride=width,
        residual_stride=width if residual else None,
        rounded=rounded,
    )
    _require(launch, device)


@cache
def _require_silu(dtype: torch.dtype, width: int, device: torch.device) -> None:
    _require(silu_mul.launch(dtype=dtype, width=width), device)


def _require(launch: Launch, device: torch.device) -> None:
    if device.type == "cuda":  # Triton's interpreter, on a CPU, takes any
        variants.require(launch, device_arch(device))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
