"""The race in which a token is drawn.

The token with the highest score / temperature - log(noise) is drawn, which is each with its
probability, as the noise is exponential: the Gumbel-max trick.

Inverting the cumulative distribution at one uniform number would be cheaper, but is
ill-conditioned. Logits differ by some 1e-5 with the shape of the batch, every cumulative sum
moves with them, and among thousands of unlikely tokens one draw in some hundreds falls to a
neighbour. Here such a difference matters only where the best two are within 1e-5 of each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replicas.engine import noise
from replicas.engine.candidates import group_maxima

_ROUNDING = 1e-9
"""More than the logarithms of one number can differ by."""


def best(scores: Tensor, token_ids: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    """The column of the token drawn, the first one among equals: [R] int64.

    `scores` [R, C] float32, -inf where a token does not run; `token_ids` [R, C] int64;
    `temperature` [R], `keys` [R, 2, 2] of the noise.
    """
    return _strengths(scores, token_ids, temperature, keys).argmax(1)


def best_of_all(scores: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    """The same over a whole vocabulary: scores [R, V] -> token ids [R] int64.

    Nobody in a group beats its highest score with its leader's noise, the group's least. Only
    groups in which that is enough to beat all leaders need to be looked at, a few tens of them.
    A row of NaN gives 0.
    """
    missing = -scores.shape[1] % noise.GROUP
    if missing:
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    maxima = group_maxima(scores)
    least, leaders = noise.of_leaders(keys, maxima.shape[1])
    least.log_()
    scale = temperature[:, None].double()
    of_leaders = scores.gather(1, leaders) / scale - least
    lowest = torch.finfo(least.dtype).min
    to_beat = of_leaders.amax(1, keepdim=True).sub_(_ROUNDING).clamp_(min=lowest)
    rows, groups = (maxima / scale - least >= to_beat).nonzero(as_tuple=True)
    token_ids = groups[:, None] * noise.GROUP + torch.arange(noise.GROUP, device=scores.device)
    if len(scores) == 1 and len(rows) > 0:
        return _best_id(scores, token_ids.view(1, -1), temperature, keys)
    runners = scores[rows[:, None], token_ids]
    strengths = _strengths(runners, token_ids, temperature[rows], keys[rows])
    return _first_best(rows, strengths, token_ids, len(scores))


def _best_id(scores: Tensor, token_ids: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    column = best(scores.gather(1, token_ids), token_ids, temperature, keys)
    return token_ids.gather(1, column[:, None]).squeeze(1)


def _strengths(scores: Tensor, token_ids: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    """[R, C] float64."""
    return scores / temperature[:, None].double() - noise.of_tokens(keys, token_ids).log_()


def _first_best(rows: Tensor, strengths: Tensor, token_ids: Tensor, count: int) -> Tensor:
    """The lowest id among the strongest of each row: [count] int64.

    `rows` [N] says whose the lines of `strengths` and `token_ids` [N, C] are.
    """
    of_line, column = strengths.max(1)
    of_row = of_line.new_full((count,), -torch.inf).scatter_reduce_(0, rows, of_line, "amax")
    ids = token_ids.gather(1, column[:, None]).squeeze(1)
    ids.masked_fill_(of_line < of_row[rows], torch.iinfo(ids.dtype).max)
    return ids.new_zeros(count).scatter_reduce_(0, rows, ids, "amin", include_self=False)
