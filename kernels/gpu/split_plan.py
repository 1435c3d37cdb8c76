"""How the contexts of decode rows are cut into work items for `attn_decode`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.attention_batch import IntArray

MIN_CHUNK = 256
"""Tokens of the smallest chunk: a multiple of every tile and block size."""

MAX_ROW_ITEMS = 32
"""Work items of a row where its chunk depends on nothing but its own length."""


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """How finely to cut."""

    max_items: int
    """Work items of a step that has no more rows than this; see `tiles.max_items`."""
    deterministic: bool = False
    """Cut a row the same way whatever is beside it, so that its result does not change in the last
    digits with the batch."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Which work items there are, and which partial results belong to which row."""

    items: npt.NDArray[np.int32]
    """[N, 4]: row, first token, end token (excluded), partial; the longest come first."""
    row_parts: npt.NDArray[np.int32]
    """[B + 1]: row b's partials are row_parts[b] .. row_parts[b + 1] - 1."""


def plan_splits(first: IntArray, end: IntArray, policy: SplitPolicy) -> SplitPlan:
    """Cut the tokens `first[b]` .. `end[b] - 1` of each row at multiples of a chunk, the smallest
    power of two from `MIN_CHUNK` on that the policy allows. Rows with first == end get no item.

    Raises ValueError where a row is negative.
    """
    if (first < 0).any() or (end < first).any():
        raise ValueError("a row sees tokens first .. end - 1, 0 <= first <= end")
    chunks = _row_chunks(first, end) if policy.deterministic else _chunks(first, end, policy)
    counts = _counts(first, end, chunks)
    row_parts = np.concatenate(([0], counts.cumsum()))
    rows = np.repeat(np.arange(len(first)), counts)
    number = np.arange(len(rows)) - row_parts[rows] + (first // chunks)[rows]
    begins = np.maximum(number * chunks[rows], first[rows])
    ends = np.minimum((number + 1) * chunks[rows], end[rows])
    items = np.stack((rows, begins, ends, np.arange(len(rows))), axis=1)
    longest_first = np.argsort(begins - ends, kind="stable")
    return SplitPlan(items[longest_first].astype(np.int32), row_parts.astype(np.int32))


def max_items(rows: int, max_tokens: int, policy: SplitPolicy) -> int:
    """No plan for so many rows of at most `max_tokens` each has more work items."""
    most = rows * -(-max_tokens // MIN_CHUNK)
    if policy.deterministic:
        return min(most, rows * MAX_ROW_ITEMS)
    return min(most, max(rows, policy.max_items))


def _counts(first: IntArray, end: IntArray, chunks: IntArray) -> IntArray:
    return np.where(end > first, -(-end // chunks) - first // chunks, 0)


def _chunks(first: IntArray, end: IntArray, policy: SplitPolicy) -> IntArray:
    """One chunk for all rows, so that items are of about one size."""
    allowed = max(policy.max_items, np.count_nonzero(end > first))
    chunks = np.full(len(first), MIN_CHUNK)
    while _counts(first, end, chunks).sum() > allowed:
        chunks *= 2
    return chunks


def _row_chunks(first: IntArray, end: IntArray) -> IntArray:
    chunks = np.full(len(first), MIN_CHUNK)
    while (large := _counts(first, end, chunks) > MAX_ROW_ITEMS).any():
        chunks[large] *= 2
    return chunks
