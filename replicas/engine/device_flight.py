"""A step on its way through a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.core.request import ChoiceKey
from replicas.core.scheduler_output import SampledToken, StepResult
from replicas.engine.device import Device, Event
from replicas.engine.sampler import Sampler
from replicas.engine.step_inputs import StepInputs
from replicas.protocol import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Scored:
    """The draws that report logprobs."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    """(alternatives to report, numbers of the draws)."""

    @classmethod
    def of(cls, inputs: StepInputs) -> Scored:
        """Draws that report as many alternatives are measured together."""
        groups: dict[int, list[int]] = {}
        for number, row in enumerate(inputs.sample_rows):
            if row.sampling.logprobs is not None:
                groups.setdefault(row.sampling.logprobs, []).append(number)
        return cls(tuple((top, tuple(numbers)) for top, numbers in groups.items()))

    @property
    def numbers(self) -> list[int]:
        """All draws, group by group."""
        return [number for _, numbers in self.groups for number in numbers]


class DeviceFlight:
    """An `InFlight` whose tokens come back by themselves. Logprobs are few and seldom: they are
    computed when the result is asked for, beside the step that follows."""

    def __init__(
        self,
        inputs: StepInputs,
        tokens: Tensor,
        event: Event,
        land: Callable[[], None],
        *,
        device: Device,
        sampler: Sampler,
        scored: Scored,
        scored_logits: Tensor | None,
        prompt_logits: Tensor | None,
    ) -> None:
        """`tokens` are in host memory, [number of draws] int64, and right once `event` has passed;
        `land` is called then. `scored_logits` are the raw logits of the scored draws, in their
        order, `prompt_logits` those of all the step's rows."""
        self._inputs = inputs
        self._tokens = tokens
        self._event = event
        self._land = land
        self._device = device
        self._sampler = sampler
        self._scored = scored
        self._scored_logits = scored_logits
        self._prompt_logits = prompt_logits

    @torch.inference_mode()
    def result(self) -> StepResult:
        """Wait for the tokens."""
        self._event.wait()
        tokens: list[int] = self._tokens.tolist()
        self._land()
        with self._device.beside(self._event):
            logprobs = self._logprobs(tokens)
            prompts = self._prompt_logprobs()
        sampled = {
            key: SampledToken(token, logprobs.get(number))
            for number, (key, token) in enumerate(zip(self._inputs.draw_keys, tokens, strict=True))
        }
        return StepResult(sampled, prompts)

    def _logprobs(self, tokens: Sequence[int]) -> dict[int, TokenLogprobs]:
        found: dict[int, TokenLogprobs] = {}
        if self._scored_logits is None:
            return found
        first = 0
        for top, numbers in self._scored.groups:
            logits = self._scored_logits[first : first + len(numbers)]
            first += len(numbers)
            reports = self._sampler.token_logprobs(logits, [tokens[n] for n in numbers], top)
            found.update(zip(numbers, reports, strict=True))
        return found

    def _prompt_logprobs(self) -> dict[ChoiceKey, tuple[TokenLogprobs, ...]]:
        if self._prompt_logits is None:
            return {}
        return self._inputs.prompt_logprobs(self._prompt_logits, self._sampler)
