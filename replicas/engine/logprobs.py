"""Log-probabilities as they are reported: of raw logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from replicas.engine.candidates import floors, group_maxima, select
from replicas.engine.weights import row_slices
from replicas.protocol import TokenLogprobs

Top = tuple[tuple[int, float], ...]


def report(logits: Tensor, token_ids: Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """What is reported for one token of each row.

    `logits` [N, V] float32 and raw; `token_ids` [N] int64; `tops` N counts of alternatives.
    Equal logits share a rank; among `top` the lowest token id comes first.
    """
    maxima = group_maxima(logits)
    peak = maxima.amax(1)
    log_sum, rank = _measure(logits, peak, token_ids)
    chosen = logits.gather(1, token_ids[:, None]).squeeze(1) - peak - log_sum
    alternatives: Sequence[Top] = [()] * len(tops)
    if any(tops):
        alternatives = _top(logits, maxima, log_sum, tops)
    return [
        TokenLogprobs(logprob, int(place), top)
        for logprob, place, top in zip(chosen.tolist(), rank.tolist(), alternatives, strict=True)
    ]


def _measure(logits: Tensor, peak: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """log(sum(exp(logit - peak))) and the rank of the token, for each row of [N, V]."""
    value = logits.gather(1, token_ids[:, None])
    log_sum, rank = torch.empty_like(peak), torch.empty_like(peak)
    for part in row_slices(logits):
        work = torch.sub(logits[part], peak[part, None])
        log_sum[part] = work.exp_().sum(1).log_()
        # Ones in float32 add up fast, and exactly up to 2^24 of them; booleans do not.
        rank[part] = torch.gt(logits[part], value[part], out=work).sum(1).add_(1)
    return log_sum, rank


def _top(logits: Tensor, maxima: Tensor, log_sum: Tensor, tops: Sequence[int]) -> list[Top]:
    most = max(tops)
    result: list[Top] = [()] * len(tops)
    counts = torch.tensor(tops, device=logits.device).clamp_(min=1)
    shift = maxima.amax(1)
    for found in select(logits, maxima, floors(maxima, counts)):
        ranked, order = found.scores.sort(dim=1, descending=True, stable=True)
        token_ids = found.token_ids.gather(1, order[:, :most])
        logprobs = ranked[:, :most] - shift[found.rows, None] - log_sum[found.rows, None]
        lines = zip(found.rows.tolist(), token_ids.tolist(), logprobs.tolist(), strict=True)
        for row, ids, values in lines:
            pairs = zip(ids[: tops[row]], values[: tops[row]], strict=True)
            result[row] = tuple(pair for pair in pairs if math.isfinite(pair[1]))
    return result
