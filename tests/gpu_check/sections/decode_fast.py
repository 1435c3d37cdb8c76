"""Decode attention, splitting and merging, beside torch's SDPA over contiguous keys and values."""

from __future__ import annotations

from tests.gpu_check.attention_bench import decode_problem, time_ours, time_peer
from tests.gpu_check.contiguous import sdpa_calls
from tests.gpu_check.rig import Rig
from tests.gpu_check.shapes import DECODES, Decode
from tests.gpu_check.timing import free_memory


def run(rig: Rig) -> None:
    """A row a shape. SDPA knows no fp8: there it gets the keys and values in bfloat16."""
    for decode in DECODES:
        _time(rig, decode)
        free_memory()


def _time(rig: Rig, decode: Decode) -> None:
    problem = decode_problem(rig, decode)
    ours = time_ours(rig, decode, problem)
    name = "torch SDPA bf16" if decode.fp8 else "torch SDPA"
    time_peer(rig, decode.item, name, problem, sdpa_calls, ours)
