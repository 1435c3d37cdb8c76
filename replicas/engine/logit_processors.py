"""What changes a row's logits before a token is drawn, in its fixed order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replicas.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Whose next token a row of logits is for."""

    sampling: SamplingParams
    choice: int
    output_index: int
    """Output tokens that came before."""
    prompt_token_ids: Sequence[int] = ()
    """Read only where `sampling.needs_history`, as is the next."""
    output_token_ids: Sequence[int] = ()


def changes_logits(row: SampleRow) -> bool:
    """Whether `process` would do anything to the row."""
    sampling = row.sampling
    return bool(
        sampling.allowed_token_ids
        or sampling.logit_bias
        or row.output_index < sampling.min_tokens
        or sampling.needs_history
    )


def process(scores: Tensor, rows: Sequence[SampleRow], eos_token_ids: Collection[int]) -> None:
    """Changes raw logits [R, V] (contiguous) in place, one `SampleRow` a row.

    Allowed tokens, then bias, then `min_tokens`, then the repetition penalty, then presence
    and frequency. Ids outside the vocabulary are passed over: one request's mistake must not
    end the step of all.
    """
    for index, row in enumerate(rows):
        if row.sampling.allowed_token_ids:
            _keep_only(scores[index], row.sampling.allowed_token_ids)
    _add(scores, [_bias(row, eos_token_ids) for row in rows])
    _penalise(scores, [_repetition_penalties(row) for row in rows])
    _add(scores, [_output_penalties(row) for row in rows])


class _Edits(NamedTuple):
    """What one row asks for: [N] token ids, each at most once, and a value for each."""

    token_ids: NDArray[np.int64]
    values: NDArray[np.float64]


_NOTHING = _Edits(np.empty(0, np.int64), np.empty(0, np.float64))


def _keep_only(scores: Tensor, token_ids: Sequence[int]) -> None:
    known = [token for token in token_ids if 0 <= token < scores.numel()]
    allowed = torch.tensor(known, dtype=torch.int64, device=scores.device)
    kept = scores[allowed]
    scores.fill_(-torch.inf)
    scores[allowed] = kept


def _bias(row: SampleRow, eos_token_ids: Collection[int]) -> _Edits:
    bias = dict(row.sampling.logit_bias)
    if row.output_index < row.sampling.min_tokens:
        bias.update(dict.fromkeys(_ends(row.sampling, eos_token_ids), -torch.inf))
    return _Edits(_array(bias), np.fromiter(bias.values(), np.float64, len(bias)))


def _ends(sampling: SamplingParams, eos_token_ids: Collection[int]) -> set[int]:
    ends = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ends.update(eos_token_ids)
    # Something must be left to draw: where nothing but ends is allowed, they stay.
    if sampling.allowed_token_ids and ends.issuperset(sampling.allowed_token_ids):
        return set()
    return ends


def _repetition_penalties(row: SampleRow) -> _Edits:
    penalty = row.sampling.repetition_penalty
    if penalty == 1.0:
        return _NOTHING
    seen = _array({*row.prompt_token_ids, *row.output_token_ids})
    return _Edits(seen, np.full(seen.shape, penalty))


def _output_penalties(row: SampleRow) -> _Edits:
    presence, frequency = row.sampling.presence_penalty, row.sampling.frequency_penalty
    if not presence and not frequency:
        return _NOTHING
    output = np.asarray(row.output_token_ids, np.int64)
    token_ids, counts = np.unique(output, return_counts=True)
    return _Edits(token_ids, -(presence + frequency * counts.astype(np.float64)))


def _array(token_ids: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(token_ids, np.int64, len(token_ids))


def _add(scores: Tensor, edits: Sequence[_Edits]) -> None:
    places, amounts = _flatten(scores, edits)
    scores.view(-1)[places] += amounts


def _penalise(scores: Tensor, edits: Sequence[_Edits]) -> None:
    places, penalty = _flatten(scores, edits)
    old = scores.view(-1)[places]
    scores.view(-1)[places] = torch.where(old > 0, old / penalty, old * penalty)


def _flatten(scores: Tensor, edits: Sequence[_Edits]) -> tuple[Tensor, Tensor]:
    """One `_Edits` a row -> places in the flat scores and the values for them, both [N]."""
    vocab_size = scores.shape[1]
    places, values = [], []
    for index, (token_ids, of_tokens) in enumerate(edits):
        known = (token_ids >= 0) & (token_ids < vocab_size)
        places.append(token_ids[known] + index * vocab_size)
        values.append(of_tokens[known])
    return (
        torch.from_numpy(np.concatenate(places)).to(scores.device),
        torch.from_numpy(np.concatenate(values)).to(scores.device, scores.dtype),
    )
