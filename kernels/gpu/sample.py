"""Tokens drawn on the device, the very ones that the engine's CPU sampler draws.

Truncation keeps a prefix of a row's tokens in the order of their ranks. Finding where it ends
takes a histogram, which says between which weights that is, a list of the few tokens there, and a
search in it. All shapes depend on those of the logits alone and nothing waits for the device, so
that calls can be part of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache

import torch
import triton
from torch import Tensor

from kernels.gpu import (
    sample_bins,
    sample_candidates,
    sample_interval,
    sample_peaks,
    sample_pick,
    sample_race,
    sample_threshold,
)
from kernels.gpu.launch import Launch
from kernels.gpu.sample_math import BINS, MAX_VOCAB, PARTS, SEGMENT

_STEPS = (
    (sample_peaks, True),
    (sample_bins, True),
    (sample_interval, False),
    (sample_candidates, True),
    (sample_threshold, False),
    (sample_race, True),
    (sample_pick, False),
)
"""In their order, with whether a program has a segment of a row rather than a row."""


@dataclass(frozen=True, slots=True)
class SampleParams:
    """What the draws of B rows depend on besides their logits; contiguous, on their device."""

    temperature: Tensor
    """[B] float32; 0 is greedy, others are at least 1e-30 (lower ones would be denormal)."""
    top_k: Tensor
    """[B] int32, at least 1; the size of the vocabulary where it is off."""
    top_p: Tensor
    """[B] float64; 1 where it is off."""
    min_p: Tensor
    """[B] float64; 0 where it is off."""
    keys: Tensor
    """[B, 4] int32, the bits of the noise's keys a, b, c and d."""


@cache
def launches(vocab_size: int) -> tuple[Launch, ...]:
    """Those of a call, in their order."""
    return tuple(step.launch(vocab_size=vocab_size) for step, _ in _STEPS)


def sample(
    logits: Tensor,
    params: SampleParams,
    *,
    out: Tensor | None = None,
    scratch: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Token ids [B] int64, in `out` if given, from processed logits [B, V] float32, contiguous,
    V <= 2^18.

    Greedy rows give the highest score, the lowest id among equals. Others draw from what top-k,
    top-p and min-p keep, in this order. A row of NaN, or of -inf, gives some token of the
    vocabulary. `scratch` is what `scratch_for` makes, to be used instead of new memory; it may
    hold anything. Raises ValueError on other shapes and types.
    """
    _check(logits, params)
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    if tokens.dtype != torch.int64 or tokens.shape != (rows,) or not tokens.is_contiguous():
        raise ValueError(f"out: {tokens.dtype} {tuple(tokens.shape)} is not int64 [{rows}]")
    tensors = {
        **(scratch_for(rows, logits.device) if scratch is None else scratch),
        "logits": logits,
        "temperatures": params.temperature,
        "top_ks": params.top_k,
        "top_ps": params.top_p,
        "min_ps": params.min_p,
        "keys": params.keys,
        "tokens": tokens,
    }
    if rows:
        segments = triton.cdiv(vocab_size, SEGMENT.value)
        for made, (_, by_segment) in zip(launches(vocab_size), _STEPS, strict=True):
            grid = (rows, segments) if by_segment else (rows,)
            made(grid, **{name: tensors[name] for name in made.types})
    return tokens


def scratch_for(rows: int, device: torch.device) -> dict[str, Tensor]:
    """What the steps leave for one another, by argument: some 70 KiB a row."""
    parts, bins, capacity = PARTS.value, BINS.value, sample_candidates.CAPACITY.value
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "peaks": (torch.float32, (rows, parts)),
        "peak_ids": (torch.int32, (rows, parts)),
        "counts": (torch.int32, (rows, bins)),
        "masses": (torch.float64, (rows, parts)),
        "interval": (torch.int32, (rows, 4)),
        "masses_before": (torch.float64, (rows, parts)),
        "num_listed": (torch.int32, (rows,)),
        "listed": (torch.int32, (rows, capacity)),
        "thresholds": (torch.int64, (rows,)),
        "strengths": (torch.float64, (rows, parts)),
        "winners": (torch.int32, (rows, parts)),
    }
    return {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (dtype, shape) in shapes.items()
    }


def _check(logits: Tensor, params: SampleParams) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits: {logits.dtype} {tuple(logits.shape)} is not float32 [B, V]")
    rows, vocab_size = logits.shape
    if not 0 < vocab_size <= MAX_VOCAB:
        raise ValueError(f"logits: a vocabulary of {vocab_size}, the limit is {MAX_VOCAB}")
    wanted = {
        "temperature": (torch.float32, (rows,)),
        "top_k": (torch.int32, (rows,)),
        "top_p": (torch.float64, (rows,)),
        "min_p": (torch.float64, (rows,)),
        "keys": (torch.int32, (rows, 4)),
    }
    for field in fields(params):
        tensor, (dtype, shape) = getattr(params, field.name), wanted[field.name]
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(f"{field.name}: {tensor.dtype} {tuple(tensor.shape)} is not {shape}")
