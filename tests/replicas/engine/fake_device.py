"""A GPU made of torch on the CPU: what is queued is done at once, graphs run their work again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.attention_batch import Segment
from kernels.block_moves import TorchBlockMoves
from replicas.engine.array_layout import Array
from replicas.engine.device import CaptureError
from replicas.engine.device_runner import DeviceRunner
from replicas.engine.draw_params import DrawParams
from replicas.engine.engine import MakeRunner
from replicas.engine.kv_pool import KVPool
from replicas.engine.logit_processors import SampleRow
from replicas.engine.race import best_of_all
from replicas.engine.sample_arrays import sample_arrays
from replicas.engine.step_planner import PlannedStep
from replicas.engine.truncation import Limits, keep_many, keep_only_
from replicas.models.hf_adapter import AttentionCall, PagedModel, run
from replicas.models.spec import ModelSpec

if TYPE_CHECKING:  # tests of the kernels choose how they run before they are first imported
    from kernels.gpu.attention_step import AttentionStep

COLDEST = 1e-30


@dataclass
class FakeEvent:
    waited: bool = False

    def wait(self) -> None:
        self.waited = True


@dataclass
class FakeGraph:
    work: Callable[[], None]
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        self.work()


@dataclass
class FakeDevice:
    name: str = "cpu"
    graphs: list[FakeGraph] = field(default_factory=list)
    refuses: bool = False

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def mark(self) -> FakeEvent:
        return FakeEvent()

    @contextmanager
    def beside(self, event: FakeEvent) -> Iterator[None]:
        assert event.waited
        yield

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        if self.refuses:
            raise CaptureError("it waits")
        work()
        self.graphs.append(FakeGraph(work))
        return self.graphs[-1]

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)


class FakePlanner:
    """The real plan, for kernels that are not there."""

    def __init__(self, spec: ModelSpec, block_size: int, max_model_len: int) -> None:
        self._windows = spec.windows
        self._block_size = block_size
        self._max_blocks = -(-max_model_len // block_size)

    def plan(self, segments: Sequence[Segment], padded_rows: int | None = None) -> PlannedStep:
        from kernels.gpu.attention_step import AttentionStep, plan_step
        from kernels.gpu.split_plan import SplitPolicy

        step = plan_step(
            segments,
            self._block_size,
            self._windows,
            max_blocks=self._max_blocks,
            tile_tokens=4,
            policy=SplitPolicy(max_items=8),
            padded_rows=padded_rows,
        )
        return PlannedStep(step.arrays, lambda tensors: AttentionStep.of(step.sizes, tensors))


class StepAttention:
    """What the kernels do with an AttentionStep, one token at a time."""

    def __init__(self, pool: KVPool, step: AttentionStep) -> None:
        self._pool = pool
        self._step = step

    def attend(self, call: AttentionCall) -> Tensor:
        step, size = self._step, self._step.block_size
        query, key = call.query, call.key
        if call.heads is not None:
            query, key = call.heads.apply(query, key)
        keys, values = self._pool.layer(call.layer)
        written = step.slots >= 0
        blocks, offsets = step.slots[written] // size, step.slots[written] % size
        keys[blocks, :, offsets] = key[written]
        values[blocks, :, offsets] = call.value[written]
        output = torch.zeros_like(query)
        per_kv = query.shape[1] // key.shape[1]
        for row, length in enumerate(step.seq_lens.tolist()):
            first, end = step.cu_q[row : row + 2].tolist()
            for token in range(first, end) if length else ():
                position = length - (end - token)
                oldest = 0 if call.window is None else max(0, position - call.window + 1)
                seen = torch.arange(oldest, position + 1)
                where = step.block_table[row, seen // size].long(), seen % size
                k = keys[where[0], :, where[1]].repeat_interleave(per_kv, dim=1)
                v = values[where[0], :, where[1]].repeat_interleave(per_kv, dim=1)
                scores = torch.einsum("hd,shd->hs", query[token], k) * call.scale
                output[token] = torch.einsum("hs,shd->hd", scores.softmax(1), v)
        return output


class FakeModel:
    """A PagedModel that attends by AttentionSteps."""

    def __init__(self, model: PagedModel) -> None:
        self.spec = model.spec
        self._model = model._model

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: KVPool,
        batch: AttentionStep,
        logit_rows: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        attention = StepAttention(kv, batch)
        return run(self._model, input_ids, positions, attention, logit_rows, out)


class FakeSampler:
    """What the kernels do with `sample_arrays`, by the CPU sampler's parts."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def arrays(self, rows: Sequence[SampleRow]) -> dict[str, Array]:
        return sample_arrays(rows, self._spec.vocab_size, self._spec.eos_token_ids)

    def draw(self, scores: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        if "allowed_rows" in arrays:
            allow(scores, arrays["allowed_rows"], arrays["allowed_words"])
        if "edit_rows" in arrays:
            names = ("edit_rows", "edit_tokens", "edit_bias", "edit_penalty", "edit_addend")
            edit(scores, *(arrays[name] for name in names))
        params = DrawParams(
            temperature=arrays["temperature"].clamp(min=COLDEST),
            top_k=arrays["top_k"].long(),
            top_p=arrays["top_p"],
            min_p=arrays["min_p"],
            keys=(arrays["noise_keys"].long() & 0xFFFF_FFFF).view(-1, 2, 2),
        )
        kept = keep_only_(keep_many(scores, params, Limits(True, True, True)), scores)
        drawn = best_of_all(kept, params.temperature, params.keys)
        return torch.where(arrays["temperature"] == 0, scores.argmax(1), drawn)


def allow(scores: Tensor, rows: Tensor, words: Tensor) -> None:
    tokens = torch.arange(scores.shape[1])
    for row, mask in zip(rows.tolist(), words, strict=True):
        allowed = (mask[tokens // 32] >> (tokens % 32)) & 1
        scores[row].masked_fill_(allowed == 0, -torch.inf)


def edit(
    scores: Tensor, rows: Tensor, tokens: Tensor, bias: Tensor, penalty: Tensor, addend: Tensor
) -> None:
    places = rows.long(), tokens.long()
    score = scores[places] + bias
    scores[places] = torch.where(score > 0, score / penalty, score * penalty) + addend


def fake_runner(model: PagedModel, device: FakeDevice, *, graphs_up_to: int = 0) -> MakeRunner:
    """Makes a DeviceRunner on the CPU, with graphs for so many rows."""

    def make(pool: KVPool, max_model_len: int) -> DeviceRunner:
        runner = DeviceRunner(
            FakeModel(model),
            pool,
            FakePlanner(model.spec, pool.block_size, max_model_len),
            FakeSampler(model.spec),
            TorchBlockMoves(),
            device,
        )
        if graphs_up_to:
            runner.capture(graphs_up_to)
        return runner

    return make
