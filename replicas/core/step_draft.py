"""A step while it is being put together."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.core.block_transfer import Restore, Save
from replicas.core.kv_manager import BlockCopy
from replicas.core.request import Choice
from replicas.core.scheduler_output import PENDING, Draw, ScheduledChoice, SchedulerOutput


class StepDraft:
    """Collects the choices that take part, in their order."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Tokens that may still be added."""
        self.num_preempted = 0
        self._tokens: dict[Choice, int] = {}
        self._copies: list[BlockCopy] = []

    def add(self, choice: Choice, num_tokens: int, copy: BlockCopy | None = None) -> None:
        """Compute the choice's next `num_tokens`, after `copy`."""
        self._tokens[choice] = num_tokens
        self.budget -= num_tokens
        if copy is not None:
            self._copies.append(copy)

    def give_out(self, host_copies: Sequence[Save | Restore]) -> SchedulerOutput:
        """The step as one value. From now on it is in flight."""
        items = []
        for choice, num_tokens in self._tokens.items():
            item = _item(choice, num_tokens)
            choice.give(num_tokens, item.num_own_draws)
            items.append(item)
        return SchedulerOutput(
            scheduled=tuple(items),
            block_copies=tuple(self._copies),
            num_preempted=self.num_preempted,
            host_copies=tuple(host_copies),
        )


def _item(choice: Choice, num_tokens: int) -> ScheduledChoice:
    start = choice.num_given_tokens
    stop = start + num_tokens
    request, sampling = choice.request, choice.sampling
    draws: tuple[Draw, ...] = ()
    if stop == choice.num_coming_tokens:
        drawing = [choice] if request.forked else request.live_choices()
        draws = tuple(_draw(c) for c in drawing)
    positions = None
    if sampling.prompt_logprobs is not None and choice.index == 0:
        first = max(start, len(choice.prompt_logprobs))
        last = min(stop, request.num_prompt_tokens - 1)
        positions = (first, last) if first < last else None
    return ScheduledChoice(
        key=choice.key,
        epoch=choice.epoch,
        start=start,
        token_ids=_token_ids(choice, start, stop),
        blocks=tuple(choice.blocks),
        sampling=sampling,
        prompt_token_ids=request.data.prompt_token_ids,
        draws=draws,
        prompt_logprobs=positions,
        decodes=num_tokens == 1 and stop == choice.num_coming_tokens > request.num_prompt_tokens,
    )


def _token_ids(choice: Choice, start: int, stop: int) -> Sequence[int]:
    known = choice.num_known_tokens
    if stop <= known:
        return choice.tokens(start, stop)
    return (*choice.tokens(start, known), *(PENDING,) * (stop - known))


def _draw(choice: Choice) -> Draw:
    history = choice.output_token_ids
    return Draw(
        key=choice.key,
        output_index=len(history) + choice.in_flight_draws,
        output_token_ids=tuple(history) if choice.sampling.needs_history else (),
    )
