"""Top-k, top-p and min-p, in this order: which tokens are kept.

Tokens are ranked by score, the lowest id first among equals. Top-p keeps the shortest prefix
of the ranking whose share of what top-k left reaches p, the likeliest token at least; min-p
keeps tokens at least that likely relative to the likeliest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from replicas.engine import weights
from replicas.engine.candidates import floors, gather, group_maxima, select
from replicas.engine.draw_params import DrawParams

_BINS = 2048


class Limits(NamedTuple):
    """Which truncations rows ask for at all; the others need no work."""

    top_k: bool
    top_p: bool
    min_p: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """What truncation left of some rows."""

    rows: Tensor
    """[B] int64."""
    token_ids: Tensor
    """[B, C] int64, ascending but for padding."""
    scores: Tensor
    """[B, C]; -inf where a token is not kept, and in the padding."""
    complete: Tensor
    """[B] bool: nothing that was not looked at would have been kept."""


def keep_few(
    scores: Tensor, params: DrawParams, count: Tensor, total: Tensor | None
) -> Iterator[Kept]:
    """Looks only at the `count` [R] likeliest tokens and a few more, with their ties.

    These must hold what top-k keeps, or its limit be off: then `total` [R] is the weight of
    all tokens, and top-p may find the row incomplete. Each row of [R, V] comes exactly once.
    """
    maxima = group_maxima(scores)
    peak = maxima.amax(1)
    for found in select(scores, maxima, floors(maxima, count)):
        mine = params[found.rows]
        ranked, columns = found.ranked()
        weighed = weights.weigh_(weights.exponents(ranked, peak[found.rows], mine.temperature))
        places = torch.arange(ranked.shape[1], device=ranked.device)
        _keep_where(weighed, torch.lt, places, mine.top_k[:, None])
        cumulative = weighed.cumsum(1, dtype=torch.float64)
        seen = cumulative[:, -1]
        needed = _needed(mine, seen if total is None else total[found.rows])
        _keep_where(weighed, torch.lt, cumulative - weighed, needed[:, None])
        _drop_unlikely(weighed, mine)
        by_id = torch.zeros_like(weighed).scatter_(1, columns, weighed)
        kept = keep_only_(by_id, found.scores)
        yield Kept(found.rows, found.token_ids, kept, seen >= needed)


def keep_many(scores: Tensor, params: DrawParams, limits: Limits) -> Tensor:
    """Any truncation, over the whole vocabulary: weights [R, V], 0 where a token is not kept."""
    weighed = weights.exponents(scores, scores.amax(1), params.temperature)
    if limits.top_k or limits.top_p:
        depth = (weighed * (-_BINS / weights.DEEPEST)).clamp_(max=_BINS - 1)
        weights.weigh_(weighed)
        _keep_prefixes(scores, depth, weighed, params, limits)
    else:
        weights.weigh_(weighed)
    if limits.min_p:
        _drop_unlikely(weighed, params)
    return weighed


def keep_only_(weighed: Tensor, scores: Tensor) -> Tensor:
    """Turns weights [R, C] into scores in place: -inf where the weight is 0."""
    # Sums take a tenth of the time of a masked fill. 0 * inf would be NaN.
    dropped = torch.eq(weighed, 0, out=weighed).mul_(torch.finfo(weighed.dtype).max).mul_(2)
    return torch.sub(scores, dropped, out=dropped)


def _keep_prefixes(
    scores: Tensor, depth: Tensor, weighed: Tensor, params: DrawParams, limits: Limits
) -> None:
    if limits.top_k:
        present = torch.gt(weighed, 0, out=torch.empty_like(weighed))
        _Histogram(scores, depth, present).cut_(weighed, params.top_k)
    if limits.top_p:
        histogram = _Histogram(scores, depth, weighed)
        histogram.cut_(weighed, _needed(params, histogram.total))


class _Histogram:
    """Sums of a measure over bins of tokens with similar scores, the likeliest bin first.

    Only the bin in which a limit falls has to be ranked. `scores`, `depth` (which rises as
    scores fall; its whole part is the bin) and `measure` are [R, V].
    """

    def __init__(self, scores: Tensor, depth: Tensor, measure: Tensor) -> None:
        self._scores, self._depth, self._measure = scores, depth, measure.double()
        # Rows of NaN must give some bin as well. By way of int32 is the fast one to int64.
        self._bins = depth.to(torch.int32).clamp_(min=0).long()
        sums = torch.zeros(len(depth), _BINS, dtype=torch.float64, device=depth.device)
        self._cumulative = sums.scatter_add_(1, self._bins, self._measure).cumsum_(1)

    @property
    def total(self) -> Tensor:
        """[R]: the measure of all tokens."""
        return self._cumulative[:, -1]

    def cut_(self, weighed: Tensor, needed: Tensor) -> None:
        """Zeroes the weights [R, V] of all but the shortest prefix of the ranking whose measure
        reaches `needed` [R], or the total."""
        needed = torch.minimum(needed, self.total)
        last = (self._cumulative < needed[:, None]).sum(1).clamp_(max=_BINS - 1)[:, None]
        before = self._cumulative.gather(1, (last - 1).clamp(min=0)) * (last > 0)
        owners, token_ids = (self._bins == last).nonzero(as_tuple=True)
        _keep_where(weighed, torch.lt, self._depth, last + 1)
        for found in gather(self._scores, owners, token_ids):
            _, columns = found.ranked()
            ranked = found.token_ids.gather(1, columns)
            measure = self._measure[found.rows[:, None], ranked]
            spent = before[found.rows] + measure.cumsum(1) - measure
            # Padding, ranked last, stands for token 0, which may well be kept.
            beyond = (spent >= needed[found.rows, None]) & (columns < found.counts[:, None])
            lines, places = beyond.nonzero(as_tuple=True)
            weighed[found.rows[lines], ranked[lines, places]] = 0


def _needed(params: DrawParams, total: Tensor) -> Tensor:
    """[R]: the weight that the nucleus must reach; above 0, so that one token is kept."""
    return (params.top_p * total).clamp(min=1)


def _drop_unlikely(weighed: Tensor, params: DrawParams) -> None:
    _keep_where(weighed, torch.ge, weighed, (params.min_p * weights.ONE).float()[:, None])


def _keep_where(
    weighed: Tensor, compare: Callable[..., Tensor], left: Tensor, right: Tensor
) -> None:
    # A product with ones and zeros takes a third of the time of a masked fill.
    weighed.mul_(compare(left, right, out=torch.empty_like(weighed)))
