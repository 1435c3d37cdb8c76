"""Partial attention results of a row's work items into one, with attention sinks."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Launch, pointer
from kernels.gpu.online_softmax import HIDDEN, LOG2_E

PARTS = 16
"""Partials that are read at a time: one after the other they would cost a latency each."""


@triton.jit
def _merge_kernel(
    partials: tl.tensor,
    lse: tl.tensor,
    row_parts: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    OUTPUT_TOKEN_STRIDE: tl.constexpr,
    VDIM: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, VDIM)
    first = tl.load(row_parts + row).to(tl.int64)
    last = tl.load(row_parts + row + 1).to(tl.int64)
    if sinks is not None:
        highest = tl.zeros([1], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = tl.full([1], 1.0, tl.float32)
    else:
        highest = tl.full([1], HIDDEN, tl.float32)
        total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([VDIM], tl.float32)
    for start in tl.range(first, last, PARTS):
        parts = start + tl.arange(0, PARTS)
        live = parts < last
        sums = tl.load(lse + parts * NUM_HEADS + head, mask=live, other=HIDDEN)
        values = tl.load(
            partials + (parts[:, None] * NUM_HEADS + head) * VALUE_DIM + dims[None, :],
            mask=live[:, None] & (dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        raised = tl.maximum(highest, tl.max(sums, 0))
        weights = tl.where(live, tl.exp2(sums - raised), 0.0)
        kept = tl.exp2(highest - raised)
        total = total * kept + tl.sum(weights, 0)
        mixed = mixed * kept + tl.sum(weights[:, None] * values, 0)
        highest = raised
    out = mixed / tl.where(total > 0.0, total, 1.0)
    tl.store(
        output + row * OUTPUT_TOKEN_STRIDE + head * VALUE_DIM + dims,
        out.to(output.dtype.element_ty),
        mask=dims < VALUE_DIM,
    )


@cache
def launch(
    *,
    num_heads: int,
    value_dim: int,
    output_dtype: torch.dtype,
    sinks_dtype: torch.dtype | None = None,
) -> Launch:
    """The variant for a layer; `sinks_dtype` is None where it has no sinks."""
    types = {
        "partials": "*fp32",
        "lse": "*fp32",
        "row_parts": "*i32",
        **({} if sinks_dtype is None else {"sinks": pointer(sinks_dtype)}),
        "output": pointer(output_dtype),
    }
    constants = {
        **({"sinks": None} if sinks_dtype is None else {}),
        "NUM_HEADS": num_heads,
        "VALUE_DIM": value_dim,
        "OUTPUT_TOKEN_STRIDE": num_heads * value_dim,
        "VDIM": triton.next_power_of_2(value_dim),
        "PARTS": PARTS,
    }
    return Launch("attn_merge", _merge_kernel, types, constants, num_warps=4)


def attn_merge(
    partials: Tensor,
    lse: Tensor,
    row_parts: Tensor,
    output: Tensor,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    """Fill and return `output` `[B, heads, value_dim]`, contiguous.

    `partials` `[N, heads, value_dim]` and `lse` `[N, heads]` float32 as `attn_decode` returns
    them; row b has partials `row_parts[b]` .. `row_parts[b + 1] - 1` (`[B + 1]` int32) and becomes
    0 where it has none. `sinks` `[heads]` are logits that join the softmax denominator. Raises
    ValueError where shapes do not agree.
    """
    rows, num_heads, value_dim = output.shape
    if partials.shape[1:] != output.shape[1:] or lse.shape != partials.shape[:2]:
        raise ValueError("partials, lse and output differ in heads or value_dim")
    if row_parts.shape != (rows + 1,) or row_parts.dtype != torch.int32:
        raise ValueError(f"row_parts is [{rows + 1}] int32, a row more than output has")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks are [{num_heads}], one a query head")
    if not (output.is_contiguous() and partials.is_contiguous() and lse.is_contiguous()):
        raise ValueError("partials, lse and output are contiguous")
    variant = launch(
        num_heads=num_heads,
        value_dim=value_dim,
        output_dtype=output.dtype,
        sinks_dtype=None if sinks is None else sinks.dtype,
    )
    given = {} if sinks is None else {"sinks": sinks}
    variant(
        (rows, num_heads), partials=partials, lse=lse, row_parts=row_parts, output=output, **given
    )
    return output
