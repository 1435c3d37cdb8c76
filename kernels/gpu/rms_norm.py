"""RMS norm over the last dimension, with or without a residual that is added before."""

from __future__ import annotations

from functools import cache
from typing import overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Launch, pointer

MAX_WIDTH = 32768
"""A row is held by one program."""


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    output,
    total,
    eps,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    element = x.dtype.element_ty
    value = tl.load(x + row * X_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        other = tl.load(residual + row * RESIDUAL_STRIDE + column, mask=mask, other=0.0)
        # What the next layer sees is rounded, and so is what is normed.
        added = (value + other.to(tl.float32)).to(element)
        tl.store(total + row * WIDTH + column, added, mask=mask)
        value = added.to(tl.float32)
    mean = tl.sum(value * value, axis=0) / WIDTH
    normed = value * tl.rsqrt(mean + eps)
    if ROUNDED:
        normed = normed.to(element).to(tl.float32)
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * WIDTH + column, (normed * scale).to(element), mask=mask)


@cache
def launch(
    *,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    width: int,
    x_stride: int,
    residual_stride: int | None,
    rounded: bool,
) -> Launch:
    """For rows of `width` that are `x_stride` elements apart; without a residual where its
    stride is None."""
    types = {
        "x": pointer(dtype),
        "weight": pointer(weight_dtype),
        "output": pointer(dtype),
        "eps": "fp32",
    }
    constants: dict[str, int | bool | None] = {
        "X_STRIDE": x_stride,
        "RESIDUAL_STRIDE": residual_stride or 0,
        "WIDTH": width,
        "BLOCK": triton.next_power_of_2(width),
        "ROUNDED": rounded,
    }
    if residual_stride is None:
        constants |= {"residual": None, "total": None}
    else:
        types |= {"residual": pointer(dtype), "total": pointer(dtype)}
    return Launch(
        op="rms_norm",
        kernel=_rms_norm,
        types=types,
        constants=constants,
        num_warps=min(16, max(1, triton.next_power_of_2(width) // 512)),
    )


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, rounded: bool) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor, rounded: bool
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, rounded: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight over rows `[N, width]`, in float32, rounded to x's type.

    `weight` `[width]` is of any float type; where models use 1 + w it holds that. `rounded`
    rounds to x's type before the weight comes in as well, as Llama does. With a `residual`
    `[N, width]`, x + residual, rounded, is normed and returned too: (normed, sum). Rows may be
    apart, as in a view of columns. Raises ValueError on other shapes and on width > `MAX_WIDTH`.
    """
    _check(x, weight, residual)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(output)
    made = launch(
        dtype=x.dtype,
        weight_dtype=weight.dtype,
        width=x.shape[1],
        x_stride=x.stride(0),
        residual_stride=None if residual is None else residual.stride(0),
        rounded=rounded,
    )
    arguments = {"x": x, "weight": weight, "output": output, "eps": eps}
    if residual is not None:
        arguments |= {"residual": residual, "total": total}
    if len(x):
        made((len(x),), **arguments)
    return output if total is None else (output, total)


def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    if x.dim() != 2 or x.stride(1) != 1 or not 0 < x.shape[1] <= MAX_WIDTH:
        raise ValueError(f"x: {tuple(x.shape)} is not rows [N, width <= {MAX_WIDTH}]")
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"weight: {tuple(weight.shape)} for rows of {x.shape[1]}")
    if residual is None:
        return
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.stride(1) != 1:
        raise ValueError(f"residual: {residual.dtype} {tuple(residual.shape)} does not fit x")
