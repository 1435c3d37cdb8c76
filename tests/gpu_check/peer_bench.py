"""A peer on the shapes that are worth its compiler's time, beside ours."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TypeVar

from tests.gpu_check.attention_bench import (
    PeerCalls,
    decode_problem,
    our_calls,
    prefill_problem,
    time_peer,
)
from tests.gpu_check.paged import PagedProblem
from tests.gpu_check.rig import Rig, UnavailableError
from tests.gpu_check.shapes import DECODES, PREFILLS, Decode, Prefill
from tests.gpu_check.timing import free_memory, replayed

S = TypeVar("S", Decode, Prefill)


def need(module: str) -> None:
    """Raises UnavailableError where it is not installed."""
    if importlib.util.find_spec(module) is None:
        raise UnavailableError(f"{module} is not installed")


def beside_ours(rig: Rig, name: str, decode: PeerCalls, prefill: PeerCalls | None) -> None:
    """Time the peer, and us again in its process; None where it has no prefill."""
    for shape in _worthwhile(rig, DECODES):
        _time(rig, name, shape.item, decode_problem(rig, shape), decode)
    if prefill is None:
        return
    for chunk in _worthwhile(rig, PREFILLS):
        _time(rig, name, chunk.item, prefill_problem(rig, chunk), prefill)


def _time(rig: Rig, name: str, item: str, problem: PagedProblem, calls: PeerCalls) -> None:
    time_peer(rig, item, name, problem, calls, replayed(rig, our_calls(problem)))
    free_memory()


def _worthwhile(rig: Rig, shapes: Sequence[S]) -> list[S]:
    """In a dry run the first one stands for all."""
    chosen = [shape for shape in shapes if shape.peers]
    return chosen[:1] if rig.dry else chosen
