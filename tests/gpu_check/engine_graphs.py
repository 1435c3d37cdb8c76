"""Decode steps of an engine's runner by graphs and without."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from replicas.config import EngineConfig
from replicas.core.request import ChoiceKey
from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler_output import SampledToken, SchedulerOutput
from replicas.engine import device_side
from replicas.engine.device_runner import DeviceRunner
from replicas.engine.graph_buckets import buckets
from replicas.engine.in_flight import Runner
from replicas.engine.kv_format import KVFormat
from replicas.engine.kv_pool import KVPool
from replicas.engine.synthetic_steps import prefill_step, together
from tests.gpu_check.engine_bench import BLOCK_SIZE, engine_backend, random_model
from tests.gpu_check.items import GRAPH_CHECKS
from tests.gpu_check.model_sizes import SIZE_DRY, SIZE_SHALLOW
from tests.gpu_check.rig import Rig
from tests.gpu_check.targets import exact

_SAMPLING = SamplingParams(1, 5, temperature=0.0, logprobs=5)
_MOST = 64
"""Choices."""
_NOISE = 0.05
"""Logprobs in bfloat16 differ by less where a matrix is multiplied in other tiles."""

Sampled = dict[ChoiceKey, SampledToken]


def run(rig: Rig) -> None:
    """Steps of some batch sizes, most of which a graph pads: tokens, logprobs and the whole KV pool
    afterwards. A replay does what the same work does kernel by kernel, bit for bit. A batch that is
    not padded may be multiplied in other tiles, so that it is the same but for rounding."""
    runner, pool, vocabulary = _runner(rig)
    wrong = compared = apart = rows = 0
    for batch in (2,) if rig.dry else (1, 3, 8, 37):
        prefill, decode = _steps(batch, pool.block_size, vocabulary)
        runner.launch(prefill).result()
        before = pool.blocks.clone()

        def computed(*, graphs: bool, replayed: bool) -> tuple[Sampled, Tensor]:
            pool.blocks.copy_(before)  # noqa: B023 - called in this round only
            # The CPU's runner, of a dry run, knows nothing of graphs.
            setattr(runner, "use_graphs", graphs)  # noqa: B010
            setattr(runner, "replay_graphs", replayed)  # noqa: B010
            sampled = runner.launch(decode).result().sampled  # noqa: B023
            return sampled, pool.blocks.clone()

        plain, _ = computed(graphs=False, replayed=False)
        eager, eager_blocks = computed(graphs=True, replayed=False)
        replayed, replayed_blocks = computed(graphs=True, replayed=True)
        wrong += sum(eager[key] != replayed[key] for key in eager)
        wrong += not torch.equal(eager_blocks, replayed_blocks)
        compared += len(eager) + 1
        apart += sum(not _alike(plain[key], replayed[key]) for key in plain)
        apart += bool((replayed_blocks[0] != 0).any())  # padding writes nothing
        rows += len(plain) + 1
    rig.recorder.add(exact(GRAPH_CHECKS[1], wrong, compared))
    rig.recorder.add(exact(GRAPH_CHECKS[2], apart, rows))


def _alike(one: SampledToken, other: SampledToken) -> bool:
    """The likeliest tokens' logprobs, whichever token comes first of two all but equal ones."""
    assert one.logprobs is not None
    assert other.logprobs is not None
    return abs(one.logprobs.logprob - other.logprobs.logprob) < _NOISE  # false of NaN


def _runner(rig: Rig) -> tuple[Runner, KVPool, int]:
    """As an engine has it, over a model of two wide layers."""
    size = SIZE_DRY if rig.dry else SIZE_SHALLOW
    model = random_model(rig, size)
    config = EngineConfig(
        block_size=16 if rig.dry else BLOCK_SIZE,
        max_num_seqs=_MOST,
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
    if not rig.dry:
        _need_graphs(runner)
    return runner, pool, size.vocabulary


def _need_graphs(runner: Runner) -> None:
    """Raise unless decode steps of all sizes replay graphs: else nothing here is compared."""
    if not isinstance(runner, DeviceRunner):
        raise TypeError(f"a {type(runner).__name__} computes here, which has no graphs")
    if tuple(runner.graph_sizes) != buckets(_MOST):
        raise RuntimeError(f"graphs were captured for {list(runner.graph_sizes)} rows: see the log")


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
