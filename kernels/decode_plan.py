"""Which blocks the decode rows of a step read, and what of them they see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention_batch import DecodeRows, IntArray

MAX_PADDING = 2
"""Rows share one score matrix while it is at most this many times the blocks they really read."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of similar length: their scores are one `[N, heads, width * block_size]` matrix.

    Pair `p` says that row `rows[p]` reads block `blocks[p]` as column `columns[p]` of its scores;
    pairs are sorted by row, then column. Columns without a pair are hidden by `bound`.
    """

    tokens: Tensor | None
    """[N] int64 rows of the ragged batch; None where it is exactly those rows in order."""
    num_rows: int
    width: int
    rows: IntArray
    columns: IntArray
    blocks: IntArray
    hidden_from: int
    """The first position of a score row that any row must not see."""
    bound: Tensor
    """[N, 1, width * block_size - hidden_from], an upper bound for scores: -inf where a position
    is hidden, else inf. (`clamp_max_` costs what adding a bias does, a tenth of `masked_fill_`,
    and unlike the bias it also hides what has overflowed in an unused slot.)"""

    @property
    def full(self) -> bool:
        """Whether every column of every row is a pair."""
        return len(self.rows) == self.num_rows * self.width


def plan_decode(
    decode: DecodeRows, num_tokens: int, block_size: int, window: int | None, device: torch.device
) -> tuple[DecodeGroup, ...]:
    """Split rows by length (powers of two) only where padding to the longest would cost more
    than `MAX_PADDING`; blocks wholly outside the window are skipped."""
    oldest = np.zeros_like(decode.positions)
    if window is not None:
        oldest = np.maximum(decode.positions - window + 1, 0)
    first = oldest // block_size
    counts = decode.positions // block_size - first + 1
    kinds = np.zeros_like(counts)
    if counts.max() * len(counts) > MAX_PADDING * counts.sum():
        kinds = np.ceil(np.log2(counts)).astype(np.int64)
    groups = []
    for kind in np.unique(kinds):
        members = np.flatnonzero(kinds == kind)
        count = counts[members]
        width = int(count.max())
        rows = np.repeat(np.arange(len(members)), count)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
        begin = decode.first[members] + first[members]
        seen = np.arange(width * block_size) + (first[members] * block_size)[:, None]
        hidden = seen > decode.positions[members, None]
        if window is not None:
            hidden |= seen < oldest[members, None]
        hidden_from = int(np.append(hidden.any(0), True).argmax())
        bound = np.where(hidden[:, None, hidden_from:], -np.inf, np.inf).astype(np.float32)
        whole = len(members) == num_tokens
        tokens = torch.from_numpy(decode.tokens[members]).to(device)
        groups.append(
            DecodeGroup(
                tokens=None if whole else tokens,
                num_rows=len(members),
                width=width,
                rows=rows,
                columns=columns,
                blocks=decode.tables[begin[rows] + columns],
                hidden_from=hidden_from,
                bound=torch.from_numpy(bound).to(device),
            )
        )
    return tuple(groups)
