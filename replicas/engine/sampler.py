"""From logits to tokens, for all rows of a step at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from replicas.core.scheduler_output import SampledToken
from replicas.engine.candidates import take_rows
from replicas.engine.draws import Draw, draw_for
from replicas.engine.logit_processors import SampleRow, changes_logits, process
from replicas.engine.logprobs import report
from replicas.protocol import TokenLogprobs

_ROWS_AT_ONCE = 64
"""Bounds the copies of logits and the candidates held at a time."""


class Sampler:
    """Draws tokens; holds no state of requests.

    A token depends on its own row's logits and `SampleRow` only, not on the batch.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """One token a row of `logits` [R, V] float32, which are left as they are.

        A row of NaN gives some token of the vocabulary and does not touch the others.
        Raises ValueError where the shape is not (number of rows, size of the vocabulary).
        """
        self._check(logits, len(rows))
        drawn = [0] * len(rows)
        plain = [index for index, row in enumerate(rows) if not changes_logits(row)]
        changed = [index for index, row in enumerate(rows) if changes_logits(row)]
        for indices in _parts(plain):
            chosen = [rows[index] for index in indices]
            _put(drawn, indices, self._draw(take_rows(logits, indices), chosen))
        for indices in _parts(changed):
            chosen = [rows[index] for index in indices]
            scores = logits[indices]
            process(scores, chosen, self._eos_token_ids)
            _put(drawn, indices, self._draw(scores, chosen))
        logprobs = self._logprobs(logits, drawn, rows)
        return [SampledToken(token, logprobs.get(index)) for index, token in enumerate(drawn)]

    def token_logprobs(
        self, logits: Tensor, token_ids: Sequence[int], top: int
    ) -> tuple[TokenLogprobs, ...]:
        """What is reported for N given tokens by raw `logits` [N, V] float32.

        Raises ValueError where the shape is not (number of tokens, size of the vocabulary).
        """
        self._check(logits, len(token_ids))
        ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
        reports: list[TokenLogprobs] = []
        for start in range(0, len(token_ids), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            reports += report(logits[part], ids[part], [top] * len(token_ids[part]))
        return tuple(reports)

    def _check(self, logits: Tensor, rows: int) -> None:
        if logits.shape != (rows, self._vocab_size):
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} for {rows} rows"
                f" and a vocabulary of {self._vocab_size}"
            )

    def _draw(self, scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Token ids [R] from processed scores [R, V]."""
        alike: dict[Draw, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            alike[draw_for(row.sampling, self._vocab_size)].append(index)
        if len(alike) == 1:
            (draw,) = alike
            return draw(scores, rows)
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=scores.device)
        for draw, indices in alike.items():
            mine = take_rows(scores, indices)
            token_ids[indices] = draw(mine, [rows[index] for index in indices])
        return token_ids

    def _logprobs(
        self, logits: Tensor, drawn: Sequence[int], rows: Sequence[SampleRow]
    ) -> dict[int, TokenLogprobs]:
        """By row, for those that ask."""
        asked = {
            index: row.sampling.logprobs
            for index, row in enumerate(rows)
            if row.sampling.logprobs is not None
        }
        found: dict[int, TokenLogprobs] = {}
        for indices in _parts(list(asked)):
            tops = [asked[index] for index in indices]
            token_ids = torch.tensor([drawn[index] for index in indices], device=logits.device)
            reports = report(take_rows(logits, indices), token_ids, tops)
            found.update(zip(indices, reports, strict=True))
        return found


def _parts(indices: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(indices), _ROWS_AT_ONCE):
        yield indices[start : start + _ROWS_AT_ONCE]


def _put(drawn: list[int], indices: Sequence[int], token_ids: Tensor) -> None:
    for index, token_id in zip(indices, token_ids.tolist(), strict=True):
        drawn[index] = token_id
