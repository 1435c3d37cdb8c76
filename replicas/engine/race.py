"""The race in which a row's token is drawn.

Token i arrives at time E / weight, where E is its own noise, exponential with mean 1; whoever
arrives first is drawn. That is token i with probability weight / total, and the same as the
highest of score / temperature - log(E), the Gumbel-max trick. The noise of one token does not
depend on which others run.

One uniform number that inverts the cumulative distribution would be cheaper, but is
ill-conditioned: logits differ by some 1e-5 with the shape of the batch, every cumulative sum
moves with them, and among thousands of unlikely tokens the draw then falls to a neighbour
once in some hundred times. In the race such a difference matters only where the first two
arrive within 1e-5 of each other, which is once in some hundred thousand times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replicas.engine.candidates import argmax, group_maxima, select
from replicas.engine.noise import exponential, uniform

_ROUNDED = 1 - 2.0**-20
"""More than float32 can take from a bound."""


def first(weights: Tensor, token_ids: Tensor, keys: Tensor) -> Tensor:
    """Who arrives first: [B, C] weights, [B, C] token ids, [B, 2] `noise` keys -> [B] columns.

    Taken in float64, so that ties are real ones, and go to the first column. A column whose
    weight is 0 never arrives.
    """
    return _speeds(weights, token_ids, keys).argmax(1)


def first_of_all(weights: Tensor, keys: Tensor) -> Tensor:
    """The same over a whole vocabulary: weights [R, V] -> token ids [R] int64.

    As E >= v, no token is faster than weight / v, which needs no logarithm. Only those that
    could thus beat the favourite run.
    """
    token_ids = torch.arange(weights.shape[1], dtype=torch.int32, device=weights.device)
    bounds = uniform(keys, token_ids, torch.float32).reciprocal_().mul_(weights)
    maxima = group_maxima(bounds)
    drawn = argmax(bounds, maxima)
    favourite = drawn[:, None]
    speeds = _speeds(weights.gather(1, favourite), favourite, keys).squeeze(1)
    for found in select(bounds, maxima, (speeds * _ROUNDED).to(bounds.dtype)):
        # Padding stands for token 0, which it may do: that one then runs twice.
        runners = weights[found.rows[:, None], found.token_ids]
        column = first(runners, found.token_ids, keys[found.rows])
        drawn[found.rows] = found.token_ids.gather(1, column[:, None]).squeeze(1)
    return drawn


def _speeds(weights: Tensor, token_ids: Tensor, keys: Tensor) -> Tensor:
    """weight / E, [B, C] float64: the inverse of the time."""
    return weights / exponential(keys, token_ids)
