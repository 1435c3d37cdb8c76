"""What a CUDA graph replays equals what runs without one, bit for bit."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import torch

from replicas.config import EngineConfig
from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler_output import SchedulerOutput
from replicas.engine import device_side
from replicas.engine.device_runner import DeviceRunner
from replicas.engine.in_flight import Runner
from replicas.engine.kv_format import KVFormat
from replicas.engine.kv_pool import KVPool
from replicas.engine.synthetic_steps import prefill_step, together
from tests.gpu_check import shapes
from tests.gpu_check.engine_bench import BLOCK_SIZE, engine_backend, random_model
from tests.gpu_check.items import GRAPH_CHECKS
from tests.gpu_check.model_sizes import SIZE_8B, SIZE_DRY
from tests.gpu_check.paged import Options, PagedProblem
from tests.gpu_check.rig import Rig
from tests.gpu_check.targets import exact
from tests.gpu_check.timing import Graph

_SAMPLING = SamplingParams(1, 5, temperature=0.0, logprobs=5)
_OPTIONS = (Options(), Options(window=100, soft_cap=20.0, sinks=True))


def run(rig: Rig) -> None:
    """Kernels first, then the engine, which pads batches to graphs of a few sizes."""
    _attention(rig)
    _engine(rig)


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


def _engine(rig: Rig) -> None:
    """Decode steps of some batch sizes, most of which a graph pads: tokens, logprobs and the whole
    KV pool afterwards."""
    runner, pool, vocabulary = _runner(rig)
    wrong = compared = 0
    for batch in (2,) if rig.dry else (1, 3, 8, 37):
        prefill, decode = _steps(batch, pool.block_size, vocabulary)
        runner.launch(prefill).result()
        before = pool.blocks.clone()
        seen = []
        for use_graphs in (False, True):
            pool.blocks.copy_(before)
            # The CPU's runner, of a dry run, knows nothing of graphs.
            setattr(runner, "use_graphs", use_graphs)  # noqa: B010
            sampled = runner.launch(decode).result().sampled
            seen.append((sampled, pool.blocks.clone()))
        (eager, eager_blocks), (replayed, replayed_blocks) = seen
        wrong += sum(eager[key] != replayed[key] for key in eager)
        wrong += not torch.equal(eager_blocks, replayed_blocks)
        compared += len(eager) + 1
    rig.recorder.add(exact(GRAPH_CHECKS[1], wrong, compared))


def _runner(rig: Rig) -> tuple[Runner, KVPool, int]:
    """As an engine has it, over a model of two wide layers."""
    size = SIZE_DRY if rig.dry else replace(SIZE_8B, layers=2, vocabulary=32_000)
    model = random_model(rig, size)
    config = EngineConfig(
        block_size=16 if rig.dry else BLOCK_SIZE,
        max_num_seqs=64,
        num_gpu_blocks_override=160,
        kernel_backend=engine_backend(rig),
    )
    kv_format = KVFormat.choose(config, model, rig.device)
    side = device_side.choose(config, model, kv_format, rig.device)
    pool = KVPool(
        model.spec,
        num_blocks=160,
        block_size=config.block_size,
        dtype=kv_format.dtype,
        device=rig.device,
    )
    runner = side.runner(pool, 4 * config.block_size)
    if not rig.dry and not isinstance(runner, DeviceRunner):
        raise TypeError(f"a {type(runner).__name__} computes here, which has no graphs")
    return runner, pool, size.vocabulary


def _steps(batch: int, block_size: int, vocabulary: int) -> tuple[SchedulerOutput, SchedulerOutput]:
    """Prompts of different lengths, up to four blocks each, then one token of each."""
    source = random.Random(batch)
    prompts, tokens = [], []
    for index in range(batch):
        length = 1 + (37 * index) % (4 * block_size - 1)
        table = range(1 + 4 * index, 5 + 4 * index)
        drawn = [source.randrange(3, vocabulary) for _ in range(length + 1)]
        step = prefill_step(length, tuple(table), index=index)
        prompts.append(_with_tokens(step, drawn[:length]))
        step = prefill_step(1, tuple(table), start=length, index=index, sampling=_SAMPLING)
        tokens.append(_with_tokens(step, drawn[length:]))
    return together(*prompts), together(*tokens)


def _with_tokens(step: SchedulerOutput, token_ids: list[int]) -> SchedulerOutput:
    (choice,) = step.scheduled
    return replace(step, scheduled=(replace(choice, token_ids=tuple(token_ids)),))
