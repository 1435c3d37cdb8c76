"""The highest-scoring tokens of each row, found without sorting the vocabulary.

Groups of neighbouring tokens are reduced to their maxima first. The k-th largest of these
is a floor that at least k tokens reach, and only groups that reach it need to be looked at.
A floor takes all of its ties, so what lies above it never depends on how ties are broken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_GROUP = 32
_NARROW = 1024
"""Rows with no more candidates share one padded batch; a wider one goes by itself."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens of some rows in ascending order of their ids, padded to one width."""

    rows: Tensor
    """[B] int64: which rows of the scores these are."""
    token_ids: Tensor
    """[B, C] int64; 0 in the padding."""
    scores: Tensor
    """[B, C] float32; -inf in the padding."""
    counts: Tensor
    """[B] int64: columns before the padding."""

    def ranked(self) -> tuple[Tensor, Tensor]:
        """Scores [B, C] from the highest down, the lowest id first among equals, and the
        columns that they stood in."""
        scores, columns = torch.sort(self.scores, dim=1, descending=True, stable=True)
        return scores, columns


def take_rows(matrix: Tensor, rows: Sequence[int]) -> Tensor:
    """The given rows (ascending, at least one) of [R, V]: a view where they are neighbours."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return matrix[rows[0] : rows[-1] + 1]
    return matrix[torch.tensor(rows, device=matrix.device)]


def group_maxima(scores: Tensor) -> Tensor:
    """[R, V] -> [R, ceil(V / 32)]: the maximum of each group of 32 neighbouring tokens."""
    vocab_size = scores.shape[1]
    groups = vocab_size // _GROUP
    whole = scores[:, : groups * _GROUP].unflatten(1, (groups, _GROUP)).amax(2)
    if groups * _GROUP == vocab_size:
        return whole
    rest = scores[:, groups * _GROUP :].amax(1, keepdim=True)
    return torch.cat((whole, rest), dim=1)


def argmax(scores: Tensor, maxima: Tensor) -> Tensor:
    """[R, V] -> [R] int64: the token with the highest score, the lowest id among equals.

    `maxima` is `group_maxima(scores)`.
    """
    group = maxima.argmax(1, keepdim=True)
    offsets = torch.arange(_GROUP, device=scores.device)
    token_ids = (group * _GROUP + offsets).clamp_(max=scores.shape[1] - 1)
    best = scores.gather(1, token_ids).argmax(1, keepdim=True)
    return token_ids.gather(1, best).squeeze(1)


def floors(maxima: Tensor, counts: Tensor) -> Tensor:
    """[R, G] group maxima, [R] int64 counts >= 1 -> [R]: scores that at least so many tokens reach.

    Finite, so that masked tokens (-inf) are never candidates. Where there are fewer groups
    than tokens asked for, every finite score is above the floor.
    """
    groups = maxima.shape[1]
    lowest = torch.finfo(maxima.dtype).min
    largest = maxima.topk(min(int(counts.max()), groups), dim=1).values
    places = (counts - 1).clamp(max=largest.shape[1] - 1)
    found = largest.gather(1, places[:, None]).squeeze(1)
    return found.masked_fill(counts > groups, lowest).clamp_(min=lowest)


def select(scores: Tensor, maxima: Tensor, floor: Tensor) -> Iterator[Candidates]:
    """All tokens that reach their row's floor; each row of [R, V] comes exactly once.

    `maxima` is `group_maxima(scores)`, `floor` [R].
    """
    rows, groups = (maxima >= floor[:, None]).nonzero(as_tuple=True)
    token_ids = groups[:, None] * _GROUP + torch.arange(_GROUP, device=scores.device)
    inside = token_ids < scores.shape[1]
    reached = inside & (scores[rows[:, None], token_ids * inside] >= floor[rows, None])
    owners = rows[:, None].expand_as(reached)[reached]
    yield from gather(scores, owners, token_ids[reached])


def gather(scores: Tensor, owners: Tensor, token_ids: Tensor) -> Iterator[Candidates]:
    """The tokens given as pairs of row and id, both [N], in ascending order; all R rows come."""
    values = scores[owners, token_ids]
    counts = torch.bincount(owners, minlength=scores.shape[0])
    ends = counts.cumsum(0)
    narrow = counts <= _NARROW
    if bool(narrow.any()):
        mine = narrow[owners]
        yield _pad(narrow, counts, owners[mine], token_ids[mine], values[mine])
    for row in (~narrow).nonzero():
        one = slice(int(ends[row] - counts[row]), int(ends[row]))
        yield Candidates(row, token_ids[None, one], values[None, one], counts[row])


def _pad(
    batch: Tensor, counts: Tensor, owners: Tensor, token_ids: Tensor, values: Tensor
) -> Candidates:
    """The candidates of the rows that the mask `batch` [R] names, in one rectangle."""
    counts = counts * batch
    before = counts.cumsum(0) - counts
    lines = (batch.cumsum(0) - 1)[owners]
    columns = torch.arange(owners.numel(), device=owners.device) - before[owners]
    shape = int(batch.sum()), max(1, int(counts.max()))
    padded_ids = torch.zeros(shape, dtype=torch.int64, device=owners.device)
    padded_scores = torch.full(shape, -torch.inf, dtype=values.dtype, device=owners.device)
    padded_ids[lines, columns] = token_ids
    padded_scores[lines, columns] = values
    return Candidates(batch.nonzero().squeeze(1), padded_ids, padded_scores, counts[batch])
