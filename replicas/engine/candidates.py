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

from replicas.engine.noise import GROUP

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
    groups = vocab_size // GROUP
    whole = scores[:, : groups * GROUP].unflatten(1, (groups, GROUP)).amax(2)
    if groups * GROUP == vocab_size:
        return whole
    rest = scores[:, groups * GROUP :].amax(1, keepdim=True)
    return torch.cat((whole, rest), dim=1)


def argmax(scores: Tensor, maxima: Tensor) -> Tensor:
    """[R, V] -> [R] int64: the token with the highest score, the lowest id among equals.

    `maxima` is `group_maxima(scores)`.
    """
    group = maxima.argmax(1, keepdim=True)
    offsets = torch.arange(GROUP, device=scores.device)
    token_ids = (group * GROUP + offsets).clamp_(max=scores.shape[1] - 1)
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
    token_ids = groups[:, None] * GROUP + torch.arange(GROUP, device=scores.device)
    inside = token_ids < scores.shape[1]
    reached = inside & (scores[rows[:, None], token_ids * inside] >= floor[rows, None])
    owners = rows[:, None].expand_as(reached)[reached]
    yield from gather(scores, owners, token_ids[reached])


def gather(scores: Tensor, owners: Tensor, token_ids: Tensor) -> Iterator[Candidates]:
    """The tokens given as pairs of row and id, both [N], in ascending order; all R rows come."""
    values = scores[owners, token_ids]
    counts = torch.bincount(owners, minlength=scores.shape[0])
    rows = torch.arange(len(counts), device=counts.device)
    if int(counts.max()) <= _NARROW:
        yield Candidates(rows, *_pad(counts, owners, token_ids, values), counts)
        return
    ends = counts.cumsum(0)
    narrow = counts <= _NARROW
    if bool(narrow.any()):
        mine = narrow[owners]
        lines = (narrow.cumsum(0) - 1)[owners[mine]]
        padded = _pad(counts[narrow], lines, token_ids[mine], values[mine])
        yield Candidates(rows[narrow], *padded, counts[narrow])
    for row in (~narrow).nonzero():
        one = slice(int(ends[row] - counts[row]), int(ends[row]))
        yield Candidates(row, token_ids[None, one], values[None, one], counts[row])


def _pad(counts: Tensor, lines: Tensor, token_ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and scores in one rectangle, the i-th of N tokens in the line `lines[i]`."""
    before = counts.cumsum(0) - counts
    columns = torch.arange(lines.numel(), device=lines.device) - before[lines]
    shape = len(counts), max(1, int(counts.max()))
    padded_ids = torch.zeros(shape, dtype=torch.int64, device=lines.device)
    padded_scores = torch.full(shape, -torch.inf, dtype=values.dtype, device=lines.device)
    padded_ids[lines, columns] = token_ids
    padded_scores[lines, columns] = values
    return padded_ids, padded_scores
