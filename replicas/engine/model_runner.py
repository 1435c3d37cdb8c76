"""Carries a step out on the device: copies blocks, runs the model, draws tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.attention_batch import AttentionBatch
from replicas.core.request import ChoiceKey
from replicas.core.scheduler_output import SampledToken, SchedulerOutput, StepResult
from replicas.engine.in_flight import InFlight, Landed
from replicas.engine.kv_pool import KVPool
from replicas.engine.sampler import Sampler
from replicas.engine.step_inputs import StepInputs
from replicas.models.hf_adapter import PagedModel


class ModelRunner:
    """Holds no request state: all that a step needs is in its SchedulerOutput, but for the tokens
    that the step before drew."""

    def __init__(self, model: PagedModel, pool: KVPool, device: str) -> None:
        self._model = model
        self._pool = pool
        self._device = device
        self._sampler = Sampler(model.spec.vocab_size, model.spec.eos_token_ids)
        self._drawn: dict[ChoiceKey, SampledToken] = {}

    def launch(self, output: SchedulerOutput) -> InFlight:
        """Compute the scheduled tokens' KV, and the tokens and logprobs that are asked for; all
        of it before this returns."""
        result = self._run(output)
        self._drawn = result.sampled
        return Landed(result)

    @torch.inference_mode()
    def _run(self, output: SchedulerOutput) -> StepResult:
        self._pool.copy(output.block_copies)
        if not output.scheduled:
            return StepResult({}, {})
        inputs = StepInputs(output.scheduled)
        for row, key in inputs.pending:
            inputs.token_ids[row] = self._drawn[key].token_id
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
            prompt_logprobs=inputs.prompt_logprobs(logits, self._sampler),
        )

    def _draw(self, logits: torch.Tensor, inputs: StepInputs) -> dict[ChoiceKey, SampledToken]:
        if not inputs.draw_rows:
            return {}
        everything = inputs.draw_rows == list(range(logits.shape[0]))
        drawn = logits if everything else logits[self._tensor(inputs.draw_rows)]
        sampled = self._sampler.sample(drawn, inputs.sample_rows)
        return dict(zip(inputs.draw_keys, sampled, strict=True))

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
