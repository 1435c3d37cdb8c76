"""The gate of an MLP: silu(gate) * up."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Launch, pointer

_CHUNK = 1024
"""Columns to a program."""


@triton.jit
def _silu_mul(gate_up, output, WIDTH_STRIDE: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = column < WIDTH_STRIDE
    gates = gate_up + row * (2 * WIDTH_STRIDE) + column
    gate = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gates + WIDTH_STRIDE, mask=mask, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * WIDTH_STRIDE + column, gated.to(output.dtype.element_ty), mask=mask)


@cache
def launch(*, dtype: torch.dtype, width: int) -> Launch:
    """For `width` columns of output in `dtype`."""
    return Launch(
        op="silu_mul",
        kernel=_silu_mul,
        types={"gate_up": pointer(dtype), "output": pointer(dtype)},
        constants={"WIDTH_STRIDE": width, "CHUNK": _CHUNK},
        num_warps=4,
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    """`[..., 2 * width]`, the gate first -> `[..., width]`: g / (1 + exp(-g)) * up in float32,
    rounded once to the input's type. Raises ValueError where the last dimension is odd or the
    input is not contiguous.
    """
    width, odd = divmod(gate_up.shape[-1], 2)
    if odd or not gate_up.is_contiguous():
        raise ValueError(f"gate_up: {tuple(gate_up.shape)} is not contiguous [..., 2 * width]")
    output = gate_up.new_empty(*gate_up.shape[:-1], width)
    if output.numel():
        grid = (output.numel() // width, triton.cdiv(width, _CHUNK))
        launch(dtype=gate_up.dtype, width=width)(grid, gate_up=gate_up, output=output)
    return output
