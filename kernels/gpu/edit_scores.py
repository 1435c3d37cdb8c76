"""What requests ask to be done to single scores: bias, repetition penalty, then what presence and
frequency of a token take off."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import Launch

_CHUNK = 128
"""Edits to a program."""


@triton.jit(do_not_specialize=["n_edits"])
def _edit_scores(
    scores,
    rows,
    token_ids,
    biases,
    penalties,
    addends,
    n_edits,
    VOCAB_STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    listed = index < n_edits
    row = tl.load(rows + index, mask=listed, other=-1).to(tl.int64)
    token_id = tl.load(token_ids + index, mask=listed, other=-1)
    wanted = (row >= 0) & (token_id >= 0) & (token_id < VOCAB_STRIDE)
    place = scores + row * VOCAB_STRIDE + token_id
    score = tl.load(place, mask=wanted, other=0.0)
    score += tl.load(biases + index, mask=listed, other=0.0)
    penalty = tl.load(penalties + index, mask=listed, other=1.0)
    # By way of float64, as the product would else be fused into the sum below, unrounded.
    product = (score.to(tl.float64) * penalty.to(tl.float64)).to(tl.float32)
    penalised = tl.where(score > 0, tl.div_rn(score, penalty), product)
    addend = tl.load(addends + index, mask=listed, other=0.0)
    tl.store(place, penalised + addend, mask=wanted)


@cache
def launch(*, vocab_size: int) -> Launch:
    """For rows of `vocab_size` scores."""
    pointers = dict.fromkeys(("scores", "biases", "penalties", "addends"), "*fp32")
    return Launch(
        op="edit_scores",
        kernel=_edit_scores,
        types={**pointers, "rows": "*i32", "token_ids": "*i32", "n_edits": "i32"},
        constants={"VOCAB_STRIDE": vocab_size, "CHUNK": _CHUNK},
        num_warps=4,
    )


def edit_scores(
    scores: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    biases: Tensor,
    penalties: Tensor,
    addends: Tensor,
) -> None:
    """Change scores [B, V] float32 at N places (row, token id), all different, in place.

    s = score + bias; s = s / penalty where s > 0, else s * penalty; s + addend: each rounded to
    float32. `rows` and `token_ids` [N] are int32; negative ones and ids beyond the vocabulary
    are passed over. `biases`, `penalties` and `addends` [N] are float32; 0, 1 and 0 change nothing.
    Raises ValueError on other shapes and types.
    """
    if scores.dim() != 2 or scores.dtype != torch.float32 or not scores.is_contiguous():
        raise ValueError(f"scores: {scores.dtype} {tuple(scores.shape)} is not float32 [B, V]")
    whole = {"rows": rows, "token_ids": token_ids}
    values = {"biases": biases, "penalties": penalties, "addends": addends}
    for name, tensor in (whole | values).items():
        dtype = torch.int32 if name in whole else torch.float32
        if tensor.dtype != dtype or tensor.shape != rows.shape or not tensor.is_contiguous():
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} is not {dtype} [N]")
    if rows.dim() == 1 and len(rows):
        made = launch(vocab_size=scores.shape[1])
        grid = (triton.cdiv(len(rows), _CHUNK),)
        made(grid, scores=scores, **whole, **values, n_edits=len(rows))
