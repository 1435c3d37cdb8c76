"""The ways to draw a token from processed scores, from the cheapest up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from replicas.core.sampling_params import SamplingParams
from replicas.engine import race, weights
from replicas.engine.candidates import argmax, group_maxima, take_rows
from replicas.engine.draw_params import DrawParams
from replicas.engine.logit_processors import SampleRow
from replicas.engine.truncation import Kept, Limits, keep_few, keep_many, keep_only_

_FEW = 256
"""The largest top-k for which ranking candidates beats passes over the vocabulary."""
_NUCLEUS_GUESS = 128
"""Candidates to look for a nucleus in first; most are far smaller."""
_TOKENS_PER_CANDIDATE = 64
"""Fewer than this, and the groups that hold the candidates are most of the vocabulary."""
_NO_LIMITS = Limits(top_k=False, top_p=False, min_p=False)


class Draw(Protocol):
    """Hashable; equal draws can be made in one batch."""

    def __hash__(self) -> int: ...

    def __call__(self, scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """Processed scores [R, V] -> token ids [R] int64; one `SampleRow` a row."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """The highest score, the lowest id among equals."""

    def __call__(self, scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        return argmax(scores, group_maxima(scores))


@dataclass(frozen=True, slots=True)
class FromTopK:
    """From the candidates of a small top-k."""

    def __call__(self, scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        params = DrawParams.of(rows, scores.shape[1], scores.device)
        token_ids = torch.zeros_like(params.top_k)
        for kept in keep_few(scores, params, params.top_k, None):
            token_ids[kept.rows] = _draw_kept(kept, params)
        return token_ids


@dataclass(frozen=True, slots=True)
class FromNucleus:
    """From what top-p keeps of all tokens, which is few of them as a rule."""

    min_p: bool

    def __call__(self, scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        params = DrawParams.of(rows, scores.shape[1], scores.device)
        total = torch.cat(
            [
                keep_many(scores[part], params[part], _NO_LIMITS).sum(1, dtype=torch.float64)
                for part in weights.row_slices(scores)
            ]
        )
        token_ids = torch.zeros_like(params.top_k)
        wide: list[int] = []
        for kept in keep_few(scores, params, torch.full_like(token_ids, _NUCLEUS_GUESS), total):
            token_ids[kept.rows] = _draw_kept(kept, params)
            wide += kept.rows[~kept.complete].tolist()
        if wide:
            wide.sort()
            limits = Limits(top_k=False, top_p=True, min_p=self.min_p)
            some = torch.tensor(wide, device=scores.device)
            token_ids[some] = _draw_many(take_rows(scores, wide), params[some], limits)
        return token_ids


@dataclass(frozen=True, slots=True)
class FromAll:
    """From the whole vocabulary."""

    def __call__(self, scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        params = DrawParams.of(rows, scores.shape[1], scores.device)
        return race.best_of_all(scores, params.temperature, params.keys)


@dataclass(frozen=True, slots=True)
class FromMany:
    """From what `limits` leave of the whole vocabulary."""

    limits: Limits

    def __call__(self, scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        params = DrawParams.of(rows, scores.shape[1], scores.device)
        return _draw_many(scores, params, self.limits)


def _draw_kept(kept: Kept, params: DrawParams) -> Tensor:
    temperature, keys = params.temperature[kept.rows], params.keys[kept.rows]
    column = race.best(kept.scores, kept.token_ids, temperature, keys)
    return kept.token_ids.gather(1, column[:, None]).squeeze(1)


def _draw_many(scores: Tensor, params: DrawParams, limits: Limits) -> Tensor:
    runners = torch.empty_like(scores)
    for part in weights.row_slices(scores):
        runners[part] = keep_only_(keep_many(scores[part], params[part], limits), scores[part])
    return race.best_of_all(runners, params.temperature, params.keys)


def draw_for(sampling: SamplingParams, vocab_size: int) -> Draw:
    """The cheapest draw that does what `sampling` asks for."""
    if sampling.temperature == 0:
        return Greedy()
    few = min(_FEW, vocab_size // _TOKENS_PER_CANDIDATE)
    if 0 < sampling.top_k <= few:
        return FromTopK()
    limits = Limits(
        top_k=0 < sampling.top_k < vocab_size, top_p=sampling.top_p < 1, min_p=sampling.min_p > 0
    )
    if limits.top_p and not limits.top_k:
        return FromNucleus(limits.min_p)
    return FromMany(limits) if any(limits) else FromAll()
