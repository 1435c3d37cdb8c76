"""Attention problems to time, and how a peer is timed beside us on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from tests.gpu_check import rig as names
from tests.gpu_check.oracle import relative_error
from tests.gpu_check.paged import FP8, PagedProblem
from tests.gpu_check.peer import report_peer
from tests.gpu_check.rig import Rig
from tests.gpu_check.shapes import (
    BLOCK_SIZE,
    BLOCK_SIZE_DRY,
    HEADS_8B,
    HEADS_DRY,
    LAYERS_8B,
    Decode,
    Heads,
    Prefill,
)
from tests.gpu_check.targets import timed
from tests.gpu_check.timing import Timing, pools_for, replayed

_SAME = 2e-2
"""Two right answers in bfloat16 differ by less."""

PeerCalls = Callable[[PagedProblem], Sequence[Callable[[], Tensor]]]
"""One call a layer; each gives `[T, heads, head_dim]`, or what can be viewed as that."""


def heads_of(rig: Rig) -> Heads:
    return HEADS_DRY if rig.dry else HEADS_8B


def decode_problem(rig: Rig, decode: Decode) -> PagedProblem:
    """Layers take turns; the pool is that of a whole model."""
    shape = decode.dry() if rig.small else decode
    spans = [(shape.context - 1, 1)] * shape.batch
    kv_dtype = FP8 if shape.fp8 else rig.dtype
    return _problem(rig, shape.item, spans, kv_dtype, shape.kv_bytes(heads_of(rig)))


def prefill_problem(rig: Rig, prefill: Prefill) -> PagedProblem:
    shape = prefill.dry() if rig.small else prefill
    heads = heads_of(rig)
    touched = 4.0 * (shape.start + shape.tokens) * heads.kv * heads.dim
    return _problem(rig, shape.item, [(shape.start, shape.tokens)], rig.dtype, touched)


def _problem(
    rig: Rig, name: str, spans: Sequence[tuple[int, int]], kv_dtype: Any, touched: float
) -> PagedProblem:
    return PagedProblem(
        rig,
        name,
        spans,
        heads_of(rig),
        block_size=BLOCK_SIZE_DRY if rig.dry else BLOCK_SIZE,
        dtype=rig.dtype,
        kv_dtype=kv_dtype,
        layers=1 if rig.dry else LAYERS_8B,
        turns=pools_for(rig, touched),
    )


def our_calls(problem: PagedProblem) -> list[Callable[[], Tensor]]:
    step = problem.step()
    return [partial(problem.attend, layer, step) for layer in range(problem.turns)]


def time_ours(rig: Rig, shape: Decode | Prefill, problem: PagedProblem) -> Timing:
    """Also reports it. Decoding is bound by memory, prefill by arithmetic."""
    heads = heads_of(rig)
    timing = replayed(rig, our_calls(problem))
    if isinstance(shape, Decode):
        floor_s = rig.floor_s(names.COPY, shape.kv_bytes(heads))
    else:
        floor_s = rig.floor_s(names.MATMUL, shape.operations(heads))
    row = timed(shape.item, timing.median_s, floor_s, shape.target, dry=rig.dry, note=timing.spread)
    rig.recorder.add(row)
    return timing


def time_peer(
    rig: Rig, item: str, name: str, problem: PagedProblem, make: PeerCalls, ours: Timing
) -> None:
    """A peer that computes something else is reported as one that fails."""

    def measure() -> float:
        calls = make(problem)
        found = calls[0]()
        expected = our_calls(problem)[0]().double()
        error = relative_error(found.reshape(expected.shape), expected)
        if not error < _SAME:
            raise ValueError(f"its result differs from ours by {error:.2g}")
        return replayed(rig, list(calls)).median_s

    report_peer(rig, item, name, measure, ours.median_s)
