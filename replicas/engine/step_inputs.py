"""What a step computes, as the rows of one ragged batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.attention_batch import Segment
from replicas.core.request import ChoiceKey
from replicas.core.scheduler_output import PENDING, ScheduledChoice
from replicas.engine.logit_processors import SampleRow
from replicas.engine.sampler import Sampler
from replicas.protocol import TokenLogprobs


class StepInputs:
    """The ragged batch of one step: rows are the scheduled choices' tokens in order.

    `pending` are the rows whose token the step before drew, with their choices. `logit_rows` are
    the batch rows whose logits are computed; `draw_rows` count within these.
    """

    def __init__(self, scheduled: Sequence[ScheduledChoice]) -> None:
        self.segments: list[Segment] = []
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.pending: list[tuple[int, ChoiceKey]] = []
        self.logit_rows: list[int] = []
        self.draw_rows: list[int] = []
        self.draw_keys: list[ChoiceKey] = []
        self.sample_rows: list[SampleRow] = []
        self._scored: list[tuple[ScheduledChoice, int]] = []
        for item in scheduled:
            self._add(item)

    def prompt_logprobs(
        self, logits: Tensor, sampler: Sampler
    ) -> dict[ChoiceKey, tuple[TokenLogprobs, ...]]:
        """Those that are asked for, by the `logit_rows`' raw logits [R, V] float32."""
        found = {}
        for item, row in self._scored:
            if item.prompt_logprobs is None or item.sampling.prompt_logprobs is None:
                continue
            first, last = item.prompt_logprobs
            found[item.key] = sampler.token_logprobs(
                logits[row : row + last - first],
                item.prompt_token_ids[first + 1 : last + 1],
                item.sampling.prompt_logprobs,
            )
        return found

    @property
    def scores_prompts(self) -> bool:
        """Whether `prompt_logprobs` has anything to say."""
        return bool(self._scored)

    def _add(self, item: ScheduledChoice) -> None:
        offset, length = len(self.token_ids), len(item.token_ids)
        self.segments.append(Segment(item.start, length, item.blocks))
        self.token_ids.extend(item.token_ids)
        self.positions.extend(range(item.start, item.start + length))
        if item.token_ids[-1] == PENDING:
            self.pending.append((offset + length - 1, item.key))
        if item.prompt_logprobs is not None:
            first, last = item.prompt_logprobs
            self._scored.append((item, len(self.logit_rows)))
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
