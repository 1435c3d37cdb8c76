"""Carries a step out on the device: copies blocks, runs the model, draws tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.attention_batch import AttentionBatch, Segment
from replicas.core.request import ChoiceKey
from replicas.core.scheduler_output import (
    SampledToken,
    ScheduledChoice,
    SchedulerOutput,
    StepResult,
)
from replicas.engine.kv_pool import KVPool
from replicas.engine.logit_processors import SampleRow
from replicas.engine.sampler import Sampler
from replicas.models.hf_adapter import PagedModel
from replicas.protocol import TokenLogprobs


class ModelRunner:
    """Holds no request state: everything a step needs is in its SchedulerOutput."""

    def __init__(self, model: PagedModel, pool: KVPool, device: str) -> None:
        self._model = model
        self._pool = pool
        self._device = device
        self._sampler = Sampler(model.spec.vocab_size, model.spec.eos_token_ids)

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> StepResult:
        """Compute the scheduled tokens' KV, and the tokens and logprobs that are asked for."""
        self._pool.copy(output.block_copies)
        if not output.scheduled:
            return StepResult({}, {})
        inputs = _StepInputs(output.scheduled)
        batch = AttentionBatch.build(inputs.segments, self._pool.block_size, self._device)
        logits = self._model.forward(
            self._tensor(inputs.token_ids),
            self._tensor(inputs.positions),
            self._pool,
            batch,
            self._tensor(inputs.logit_rows),
        )
        return StepResult(
            sampled=self._draw(logits, inputs),
            prompt_logprobs=self._prompt_logprobs(logits, output.scheduled, inputs),
        )

    def _draw(self, logits: torch.Tensor, inputs: _StepInputs) -> dict[ChoiceKey, SampledToken]:
        if not inputs.draw_rows:
            return {}
        everything = inputs.draw_rows == list(range(logits.shape[0]))
        drawn = logits if everything else logits[self._tensor(inputs.draw_rows)]
        sampled = self._sampler.sample(drawn, inputs.sample_rows)
        return dict(zip(inputs.draw_keys, sampled, strict=True))

    def _prompt_logprobs(
        self, logits: torch.Tensor, scheduled: Sequence[ScheduledChoice], inputs: _StepInputs
    ) -> dict[ChoiceKey, tuple[TokenLogprobs, ...]]:
        found = {}
        for item in scheduled:
            if item.prompt_logprobs is None or item.sampling.prompt_logprobs is None:
                continue
            first, last = item.prompt_logprobs
            row = inputs.prompt_logit_rows[item.key]
            found[item.key] = self._sampler.token_logprobs(
                logits[row : row + last - first],
                item.prompt_token_ids[first + 1 : last + 1],
                item.sampling.prompt_logprobs,
            )
        return found

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


class _StepInputs:
    """The ragged batch of one step: rows are the scheduled choices' tokens in order.

    `logit_rows` are the batch rows whose logits are computed; `draw_rows` and
    `prompt_logit_rows` count within these.
    """

    def __init__(self, scheduled: Sequence[ScheduledChoice]) -> None:
        self.segments: list[Segment] = []
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.logit_rows: list[int] = []
        self.draw_rows: list[int] = []
        self.draw_keys: list[ChoiceKey] = []
        self.sample_rows: list[SampleRow] = []
        self.prompt_logit_rows: dict[ChoiceKey, int] = {}
        for item in scheduled:
            self._add(item)

    def _add(self, item: ScheduledChoice) -> None:
        offset, length = len(self.token_ids), len(item.token_ids)
        self.segments.append(Segment(item.start, length, item.blocks))
        self.token_ids.extend(item.token_ids)
        self.positions.extend(range(item.start, item.start + length))
        if item.prompt_logprobs is not None:
            first, last = item.prompt_logprobs
            self.prompt_logit_rows[item.key] = len(self.logit_rows)
            self.logit_rows.extend(range(offset + first - item.start, offset + last - item.start))
        if not item.draws:
            return
        row = len(self.logit_rows)
        self.logit_rows.append(offset + length - 1)
        for draw in item.draws:  # choices that fork here draw from the same logits
            self.draw_rows.append(row)
            self.draw_keys.append(draw.key)
            self.sample_rows.append(
                SampleRow(
                    sampling=item.sampling,
                    choice=draw.key[1],
                    output_index=draw.output_index,
                    prompt_token_ids=item.prompt_token_ids,
                    output_token_ids=draw.output_token_ids,
                )
            )
