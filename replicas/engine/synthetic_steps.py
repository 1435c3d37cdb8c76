"""Steps made up to measure, to warm up and to probe with: no request stands behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler_output import Draw, ScheduledChoice, SchedulerOutput

GREEDY = SamplingParams(1, 0, temperature=0.0)
_WARM_UP = (
    GREEDY,
    SamplingParams(1, 0),
    SamplingParams(1, 0, top_k=5, top_p=0.9, min_p=0.01, logprobs=1),
    SamplingParams(1, 0, allowed_token_ids=(0, 1), logit_bias=((0, 1.0),)),
    SamplingParams(1, 0, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
)
"""Together they need every way to sample."""
_COPIES = (1, 2, 4, 8, 16, 32)
"""Kernels copy blocks by the next power of two, up to this many at a time."""


def decode_step(
    tables: Sequence[Sequence[int]], context: int, sampling: SamplingParams = GREEDY
) -> SchedulerOutput:
    """One token for each block table, behind `context` tokens (>= 0) of it."""
    return _step(
        [_choice(index, context, 1, table, sampling) for index, table in enumerate(tables)]
    )


def prefill_step(
    tokens: int,
    table: Sequence[int],
    *,
    start: int = 0,
    index: int = 0,
    sampling: SamplingParams = GREEDY,
    scored: bool = False,
) -> SchedulerOutput:
    """A chunk of `tokens` from position `start` on, of the choice `index`. Where it is `scored`,
    the logits of all its tokens are computed, which takes the most memory."""
    if scored:
        sampling = replace(sampling, prompt_logprobs=0)
    return _step([_choice(index, start, tokens, table, sampling)])


def together(*steps: SchedulerOutput) -> SchedulerOutput:
    """The choices of several steps in one."""
    return _step([item for step in steps for item in step.scheduled])


def warm_up_steps(block_size: int) -> tuple[SchedulerOutput, ...]:
    """Small steps that need every kernel between them; they use block 1 only."""
    decodes = [_choice(index, 0, 1, (1,), sampling) for index, sampling in enumerate(_WARM_UP)]
    prefill = prefill_step(min(3, block_size), (1,), index=len(decodes), scored=True)
    copying = [replace(decode_step([(1,)], 0), block_copies=((1, 1),) * count) for count in _COPIES]
    return _step([*decodes, *prefill.scheduled]), *copying


def _step(items: Sequence[ScheduledChoice]) -> SchedulerOutput:
    return SchedulerOutput(scheduled=tuple(items), block_copies=(), num_preempted=0)


def _choice(
    index: int, start: int, tokens: int, table: Sequence[int], sampling: SamplingParams
) -> ScheduledChoice:
    key = ("", index)
    history = (0,) if sampling.needs_history else ()
    return ScheduledChoice(
        key=key,
        epoch=0,
        start=start,
        token_ids=(0,) * tokens,
        blocks=tuple(table),
        sampling=sampling,
        prompt_token_ids=(0,) * (start + tokens),
        # A drawn token is waited for: else a GPU would only have been told to compute.
        draws=(Draw(key, output_index=0, output_token_ids=history),),
        prompt_logprobs=None if sampling.prompt_logprobs is None else (start, start + tokens - 1),
        decodes=tokens == 1,
    )
