"""Prefill attention of whole prompts and of chunks, beside torch's SDPA."""

from __future__ import annotations

from tests.gpu_check.attention_bench import prefill_problem, time_ours, time_peer
from tests.gpu_check.contiguous import sdpa_calls
from tests.gpu_check.rig import Rig
from tests.gpu_check.shapes import PREFILLS, Prefill
from tests.gpu_check.timing import free_memory


def run(rig: Rig) -> None:
    """A row a shape."""
    for prefill in PREFILLS:
        _time(rig, prefill)
        free_memory()


def _time(rig: Rig, prefill: Prefill) -> None:
    problem = prefill_problem(rig, prefill)
    ours = time_ours(rig, prefill, problem)
    time_peer(rig, prefill.item, "torch SDPA", problem, sdpa_calls, ours)
