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
    edits = [edits_of(row, eos_token_ids) for row in rows]
    _add(scores, [each.bias for each in edits])
    _penalise(scores, [each.repetition for each in edits])
    _add(scores, [each.output for each in edits])


class TokenValues(NamedTuple):
    """[N] token ids, each at most once, and a value for each."""

    token_ids: NDArray[np.int64]
    values: NDArray[np.float64]


class Edits(NamedTuple):
    """What one row asks for beside its allowed tokens."""

    bias: TokenValues
    """To be added first, that of `min_tokens` in it."""
    repetition: TokenValues
    """By which positive scores are divided and others multiplied, then."""
    output: TokenValues
    """To be added last."""


def edits_of(row: SampleRow, eos_token_ids: Collection[int]) -> Edits:
    """The row's edits; ids may lie outside the vocabulary."""
    return Edits(_bias(row, eos_token_ids), _repetition_penalties(row), _output_penalties(row))


_NOTHING = TokenValues(np.empty(0, np.int64), np.empty(0, np.float64))


def _keep_only(scores: Tensor, token_ids: Sequence[int]) -> None:
    known = [token for token in token_ids if 0 <= token < scores.numel()]
    allowed = torch.tensor(known, dtype=torch.int64, device=scores.device)
    kept = scores[allowed]
    scores.fill_(-torch.inf)
    scores[allowed] = kept


def _bias(row: SampleRow, eos_token_ids: Collection[int]) -> TokenValues:
    bias = dict(row.sampling.logit_bias)
    if row.output_index < row.sampling.min_tokens:
        bias.update(dict.fromkeys(_ends(row.sampling, eos_token_ids), -torch.inf))
    return TokenValues(_array(bias), np.fromiter(bias.values(), np.float64, len(bias)))


def _ends(sampling: SamplingParams, eos_token_ids: Collection[int]) -> set[int]:
    ends = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ends.update(eos_token_ids)
    # Something must be left to draw: where nothing but ends is allowed, they stay.
    if sampling.allowed_token_ids and ends.issuperset(sampling.allowed_token_ids):
        return set()
    return ends


def _repetition_penalties(row: SampleRow) -> TokenValues:
    penalty = row.sampling.repetition_penalty
    if penalty == 1.0:
        return _NOTHING
    seen = _array({*row.prompt_token_ids, *row.output_token_ids})
    return TokenValues(seen, np.full(seen.shape, penalty))


def _output_penalties(row: SampleRow) -> TokenValues:
    presence, frequency = row.sampling.presence_penalty, row.sampling.frequency_penalty
    if not presence and not frequency:
        return _NOTHING
    output = np.asarray(row.output_token_ids, np.int64)
    token_ids, counts = np.unique(output, return_counts=True)
    return TokenValues(token_ids, -(presence + frequency * counts.astype(np.float64)))


def _array(token_ids: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(token_ids, np.int64, len(token_ids))


def _add(scores: Tensor, edits: Sequence[TokenValues]) -> None:
    places, amounts = _flatten(scores, edits)
    scores.view(-1)[places] += amounts


def _penalise(scores: Tensor, edits: Sequence[TokenValues]) -> None:
    places, penalty = _flatten(scores, edits)
    old = scores.view(-1)[places]
    scores.view(-1)[places] = torch.where(old > 0, old / penalty, old * penalty)


def _flatten(scores: Tensor, edits: Sequence[TokenValues]) -> tuple[Tensor, Tensor]:
    """One `TokenValues` a row -> places in the flat scores and the values for them, both [N]."""
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
