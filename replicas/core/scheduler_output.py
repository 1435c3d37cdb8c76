"""What one step is to do, as one frozen value; and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replicas.core.block_transfer import Restore, Save
from replicas.core.request import ChoiceKey
from replicas.core.sampling_params import SamplingParams
from replicas.protocol import FinishReason, TokenDelta, TokenLogprobs

PENDING = -1
"""Stands for the token that the step given out just before draws for the same choice."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be drawn from the logits of a scheduled choice's last token."""

    key: ChoiceKey
    output_index: int
    output_token_ids: Sequence[int]
    """The history so far; empty unless the sampling parameters need it."""


@dataclass(frozen=True, slots=True)
class ScheduledChoice:
    """Tokens of one choice to be computed in this step."""

    key: ChoiceKey
    epoch: int
    """The choice's: where it has another one by the end of the step, the results are stale."""
    start: int
    """Position of the first token to compute."""
    token_ids: Sequence[int]
    """The last one may be PENDING, where the step before has not ended."""
    blocks: tuple[int, ...]
    """The choice's block table; covers start + len(token_ids) tokens."""
    sampling: SamplingParams
    prompt_token_ids: Sequence[int]
    draws: tuple[Draw, ...] = ()
    """Empty while known tokens remain; several where choices fork off the prompt."""
    prompt_logprobs: tuple[int, int] | None = None
    """Positions start..stop whose logits give the prompt's next tokens their logprobs."""
    decodes: bool = False
    """A single token, the one drawn last: nothing is prefilled."""

    @property
    def num_own_draws(self) -> int:
        """1 where it ends with a token of the choice itself, else 0."""
        return 1 if self.draws else 0


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: copy `block_copies`, then compute `scheduled`."""

    scheduled: tuple[ScheduledChoice, ...]
    block_copies: tuple[tuple[int, int], ...]
    """(source, destination) block ids, all to be copied before anything is written."""
    num_preempted: int
    host_copies: tuple[Save | Restore, ...] = ()
    """Copies between device and host to start first: this step reads no block they fill and
    writes none they read."""

    @property
    def num_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The outcome of one Draw."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the model runner made of a SchedulerOutput."""

    sampled: dict[ChoiceKey, SampledToken]
    prompt_logprobs: dict[ChoiceKey, tuple[TokenLogprobs, ...]]
    compute_s: float = 0.0
    """Seconds that the step took on the device."""


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """The times of one ended choice, seconds."""

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    preemptions: int
    queue_s: float
    prefill_s: float
    decode_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True)
class ResumeCost:
    """What one preemption cost until the choice had caught up, predicted and measured."""

    key: ChoiceKey
    swapped: bool
    predicted_s: float
    actual_s: float
    stall_s: float
    """From the preemption until the choice could compute anew, or gave up waiting."""
    caught_up: bool = True
    """False where it was preempted again or ended before: `actual_s` is only what came of it."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step changed: deltas for clients, times for metrics."""

    deltas: tuple[TokenDelta, ...] = ()
    finished: tuple[FinishedChoice, ...] = ()
    first_token_s: tuple[float, ...] = ()
    """Time to first token, one a request."""
    inter_token_s: tuple[float, ...] = ()
    resumed: tuple[ResumeCost, ...] = ()
    """Preemptions that cost their choices no more: nearly all have caught up."""
