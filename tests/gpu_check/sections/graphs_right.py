"""What a CUDA graph replays equals what runs without one, bit for bit."""

from __future__ import annotations

from functools import partial

import torch

from tests.gpu_check import shapes
from tests.gpu_check.items import GRAPH_CHECKS
from tests.gpu_check.paged import Options, PagedProblem
from tests.gpu_check.rig import Rig
from tests.gpu_check.targets import exact
from tests.gpu_check.timing import Graph

_OPTIONS = (Options(), Options(window=100, soft_cap=20.0, sinks=True))


def run(rig: Rig) -> None:
    """Kernels first: they need nothing that the engine needs."""
    _attention(rig)
    from tests.gpu_check import engine_graphs

    engine_graphs.run(rig)


def _attention(rig: Rig) -> None:
    """Mixed steps; the queries change between replays, as they do in serving."""
    spans = ((7, 1), (30, 1), (3, 5)) if rig.dry else ((5000, 1), (63, 1), (999, 1), (100, 300))
    problem = PagedProblem(
        rig,
        "graph",
        spans,
        shapes.HEADS_DRY if rig.dry else shapes.HEADS_8B,
        block_size=shapes.BLOCK_SIZE_DRY if rig.dry else shapes.BLOCK_SIZE,
        dtype=rig.dtype,
    )
    step = problem.step([options.window for options in _OPTIONS])
    calls = [partial(problem.attend, 0, step, options) for options in _OPTIONS]
    graph = Graph(calls)
    wrong, rounds = 0, 1 if rig.dry else 3
    for _ in range(rounds):
        problem.queries.normal_()
        eager = [call() for call in calls]
        for output in graph.outputs:
            assert isinstance(output, torch.Tensor)
            output.fill_(torch.nan)
        graph.replay()
        for output, expected in zip(graph.outputs, eager, strict=True):
            assert isinstance(output, torch.Tensor)
            wrong += not torch.equal(output, expected)
    rig.recorder.add(exact(GRAPH_CHECKS[0], wrong, rounds * len(calls)))
