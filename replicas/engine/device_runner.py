"""Computes steps on a GPU beside the host: nothing in `launch` waits for the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.block_moves import BlockMoves
from replicas.core.request import ChoiceKey
from replicas.core.scheduler_output import SchedulerOutput, StepResult
from replicas.engine.array_layout import Array, ArrayLayout
from replicas.engine.decode_graphs import CapturedBucket, DecodeGraphs
from replicas.engine.device import CaptureError, Device
from replicas.engine.device_flight import DeviceFlight, Scored
from replicas.engine.device_sampler import DeviceSampler
from replicas.engine.graph_buckets import buckets
from replicas.engine.in_flight import InFlight, Landed
from replicas.engine.kv_pool import KVPool
from replicas.engine.sampler import Sampler
from replicas.engine.step_arrays import draw_arrays, is_plain_decode, token_arrays
from replicas.engine.step_inputs import StepInputs
from replicas.engine.step_planner import PlannedStep, StepPlanner
from replicas.engine.transfer_slots import TransferSlot, TransferSlots
from replicas.models.spec import ModelSpec

if TYPE_CHECKING:
    from kernels.gpu.attention_step import AttentionStep

_IN_FLIGHT = 2
_BESIDE_BYTES = 1 << 20
"""Beside a graph's inputs, for block copies and sampling: a step with more runs without one."""
_KEPT_TOKENS = 4096
"""Drawn tokens that the next step may ask for."""

_logger = logging.getLogger(__name__)


class StepModel(Protocol):
    """What is needed of a `PagedModel`."""

    spec: ModelSpec

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: KVPool,
        batch: AttentionStep,
        logit_rows: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `PagedModel.forward`."""
        ...


class DeviceRunner:
    """A `Runner` for one GPU.

    All that a step needs goes to the device in one copy out of pinned memory, and its tokens come
    back in one. Tokens also stay there, for the next step. Decode steps replay graphs, in which
    the batch is padded; other steps, and larger ones, launch their kernels one by one.
    """

    def __init__(
        self,
        model: StepModel,
        pool: KVPool,
        planner: StepPlanner,
        sampler: DeviceSampler,
        moves: BlockMoves,
        device: Device,
    ) -> None:
        spec = model.spec
        self._model = model
        self._pool = pool
        self._planner = planner
        self._sampler = sampler
        self._moves = moves
        self._device = device
        self._reporter = Sampler(spec.vocab_size, spec.eos_token_ids)
        self._slots = TransferSlots(device, _IN_FLIGHT)
        self._drawn = torch.zeros(_KEPT_TOKENS, dtype=torch.int64, device=device.name)
        self._drawn_by: dict[ChoiceKey, int] = {}
        self._graphs: DecodeGraphs | None = None
        self._graph_logits = torch.empty(0, spec.vocab_size, device=device.name)
        self.use_graphs = True
        """False computes all steps without graphs, those that are captured too."""
        self.replay_graphs = True
        """False does the work of graphs, padding included, kernel by kernel."""

    @property
    def graph_sizes(self) -> Sequence[int]:
        """Batch sizes that are captured, ascending; none where decode steps have no graphs."""
        return () if self._graphs is None else self._graphs.sizes

    @torch.inference_mode()
    def capture(self, max_rows: int) -> None:
        """Capture decode steps of up to `max_rows`. Before it is called, and for a model whose
        forward pass waits for the device, all steps are computed without graphs."""
        sizes = buckets(max_rows)
        padding = {rows: self._padding(rows) for rows in sizes}
        room = max(ArrayLayout.of(arrays).end for _, arrays in padding.values())
        graphs = DecodeGraphs(self._device, room + _BESIDE_BYTES)
        shape = (sizes[-1], self._model.spec.vocab_size)
        self._graph_logits = torch.empty(shape, dtype=torch.float32, device=self._device.name)
        try:
            for rows in reversed(sizes):
                plan, arrays = padding[rows]
                graphs.capture(rows, arrays, self._work(plan, rows))
        except CaptureError as error:
            _logger.warning("decode steps run without graphs: %s", error)
            return
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> InFlight:
        """Give the device a step; see `Runner.launch`.

        Raises:
            ValueError: a PENDING token was not drawn by the step before.
            RuntimeError: two steps are in flight already.
        """
        if not output.scheduled:
            assert not output.block_copies
            return Landed(StepResult({}, {}))
        # Kernels want rows of one token first; their order means nothing else.
        inputs = StepInputs(sorted(output.scheduled, key=lambda item: len(item.token_ids) > 1))
        scored = Scored.of(inputs)
        beside = draw_arrays(inputs, scored, output.block_copies)
        beside |= self._sampler.arrays(inputs.sample_rows)
        slot = self._slots.take()
        bucket = self._bucket(inputs, beside)
        if bucket is None:
            tensors, logits = self._compute(slot, inputs, beside)
        else:
            tensors, logits = self._replay(slot, bucket, inputs, beside)
        return self._finish(slot, inputs, scored, tensors, logits)

    def _bucket(self, inputs: StepInputs, beside: Mapping[str, Array]) -> CapturedBucket | None:
        if self._graphs is None or not self.use_graphs or not is_plain_decode(inputs):
            return None
        bucket = self._graphs.bucket(len(inputs.segments))
        if bucket is None:
            return None
        end = ArrayLayout.of(beside, bucket.layout.end).end
        return bucket if end <= len(self._graphs.inputs) else None

    def _compute(
        self, slot: TransferSlot, inputs: StepInputs, beside: Mapping[str, Array]
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Without a graph: (the step's arrays on the device, its logits)."""
        plan = self._planner.plan(inputs.segments)
        arrays = {**plan.arrays, **token_arrays(inputs, self._drawn_by), **beside}
        arrays["logit_rows"] = np.array(inputs.logit_rows, dtype=np.int64)
        layout = ArrayLayout.of(arrays)
        host = slot.up(layout.end)
        layout.write(arrays, host.numpy())
        buffer = torch.empty(layout.end, dtype=torch.uint8, device=self._device.name)
        tensors = layout.tensors(buffer.copy_(host, non_blocking=True))
        self._copy_blocks(tensors)
        logits = self._forward(tensors, plan, tensors["logit_rows"])
        return tensors, logits

    def _replay(
        self,
        slot: TransferSlot,
        bucket: CapturedBucket,
        inputs: StepInputs,
        beside: Mapping[str, Array],
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """The same by a graph."""
        assert self._graphs is not None
        plan = self._planner.plan(inputs.segments, padded_rows=bucket.rows)
        arrays = {**plan.arrays, **token_arrays(inputs, self._drawn_by, bucket.rows)}
        rest = ArrayLayout.of(beside, bucket.layout.end)
        host = slot.up(rest.end)
        bucket.layout.write(arrays, host.numpy())
        rest.write(beside, host.numpy())
        self._graphs.inputs[: rest.end].copy_(host, non_blocking=True)
        tensors = rest.tensors(self._graphs.inputs)
        self._copy_blocks(tensors)
        if self.replay_graphs:
            bucket.graph.replay()
        else:
            bucket.work()
        return tensors, self._graph_logits[: len(inputs.segments)]

    def _copy_blocks(self, tensors: Mapping[str, Tensor]) -> None:
        if "block_pairs" in tensors:
            self._moves.copy(self._pool.blocks, tensors["block_pairs"])

    def _forward(
        self,
        tensors: Mapping[str, Tensor],
        plan: PlannedStep,
        logit_rows: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """[R, V] float32."""
        sources = tensors["sources"]
        drawn = self._drawn.index_select(0, sources.clamp(min=0))
        token_ids = torch.where(sources >= 0, drawn, tensors["token_ids"])
        step = plan.make(tensors)
        positions = tensors["positions"]
        return self._model.forward(token_ids, positions, self._pool, step, logit_rows, out)

    def _finish(
        self,
        slot: TransferSlot,
        inputs: StepInputs,
        scored: Scored,
        tensors: Mapping[str, Tensor],
        logits: Tensor,
    ) -> InFlight:
        """Draw, and send the tokens to the host."""
        scores = logits
        if "draw_rows" in tensors:
            scores = logits.index_select(0, tensors["draw_rows"])
        raw = None
        if "scored_draws" in tensors:
            raw = scores.index_select(0, tensors["scored_draws"])  # sampling changes scores
        drawn = self._drawn[:0]
        if inputs.draw_keys:
            drawn = self._sampler.draw(scores, tensors)
        kept = drawn[:_KEPT_TOKENS]
        self._drawn[: len(kept)].copy_(kept)
        self._drawn_by = {key: number for number, key in enumerate(inputs.draw_keys[: len(kept)])}
        tokens = slot.down(drawn.nbytes).view(torch.int64)
        tokens.copy_(drawn, non_blocking=True)
        return DeviceFlight(
            inputs,
            tokens,
            self._device.mark(),
            lambda: self._slots.give_back(slot),
            device=self._device,
            sampler=self._reporter,
            scored=scored,
            scored_logits=raw,
            prompt_logits=logits if inputs.scores_prompts else None,
        )

    def _padding(self, rows: int) -> tuple[PlannedStep, dict[str, Array]]:
        """A decode step of nothing but padding, and its arrays."""
        plan = self._planner.plan((), padded_rows=rows)
        return plan, {**plan.arrays, **token_arrays(StepInputs(()), {}, rows)}

    def _work(
        self, plan: PlannedStep, rows: int
    ) -> Callable[[Mapping[str, Tensor]], Callable[[], None]]:
        """What `DecodeGraphs.capture` prepares a batch size with."""
        logit_rows = torch.arange(rows, device=self._device.name)
        logits = self._graph_logits[:rows]

        def prepare(tensors: Mapping[str, Tensor]) -> Callable[[], None]:
            def work() -> None:
                self._forward(tensors, plan, logit_rows, logits)

            return work

        return prepare
