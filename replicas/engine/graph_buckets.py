"""For which batch sizes decode steps are captured as graphs, and which one a step takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LARGEST = 256
"""Rows. Beyond, the device is busy for longer than the host takes to launch kernels one by one."""
_SMALL = (1, 2, 4)
_STEP = 8


def buckets(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24 .. 256, up to the first that holds `max_rows` (at least 1)."""
    sizes = (*_SMALL, *range(_STEP, LARGEST + 1, _STEP))
    return sizes[: bisect_left(sizes, max_rows) + 1]


def bucket_for(num_rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that holds `num_rows`; None where none does."""
    index = bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else None
