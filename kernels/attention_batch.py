"""What one engine step attends to: segments of new tokens over their blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

T = TypeVar("T")
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Segment:
    """New tokens of one choice: positions `start` .. `start + length - 1`."""

    start: int
    """Position of the first new token: how many tokens the pool already holds."""
    length: int
    """New tokens, >= 1."""
    blocks: Sequence[int]
    """Block table, covers `start + length` tokens."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The segments of one new token. Row `n` sees positions 0 .. `positions[n]`."""

    tokens: IntArray
    """[N], rows of the ragged batch."""
    positions: IntArray
    """[N]"""
    tables: IntArray
    """Block tables, one after the other."""
    first: IntArray
    """[N], where each row's table starts in `tables`."""


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """A segment of more than one new token."""

    tokens: slice
    """Rows of the ragged batch."""
    start: int
    blocks: Tensor
    """Int64 block table, exactly as long as the segment needs."""


@dataclass(frozen=True)
class AttentionBatch:
    """The ragged `[T]` batch of one step; its rows are the segments' new tokens in order."""

    block_size: int
    num_tokens: int
    token_blocks: Tensor
    """[T] int64: where each new token's key and value go."""
    token_offsets: Tensor
    """[T] int64, within the block."""
    decode: DecodeRows | None
    prefill: tuple[PrefillSegment, ...]
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def build(
        cls, segments: Sequence[Segment], block_size: int, device: torch.device | str
    ) -> AttentionBatch:
        """Index a step. Raises ValueError where a segment is empty or its table too short."""
        starts = np.array([segment.start for segment in segments], dtype=np.int64)
        lengths = np.array([segment.length for segment in segments], dtype=np.int64)
        sizes = np.array([len(segment.blocks) for segment in segments], dtype=np.int64)
        if (starts < 0).any() or (lengths < 1).any():
            raise ValueError("a segment has at least one new token and no negative start")
        if (sizes * block_size < starts + lengths).any():
            raise ValueError("a block table does not cover its segment")
        tables = np.array(
            list(chain.from_iterable(segment.blocks for segment in segments)), dtype=np.int64
        )
        first_block = np.cumsum(sizes) - sizes
        first_token = np.cumsum(lengths) - lengths
        num_tokens = int(lengths.sum())
        positions = np.arange(num_tokens) + np.repeat(starts - first_token, lengths)
        token_blocks = tables[np.repeat(first_block, lengths) + positions // block_size]
        single = np.flatnonzero(lengths == 1)
        decode = DecodeRows(
            tokens=first_token[single],
            positions=starts[single],
            tables=tables,
            first=first_block[single],
        )
        prefill = []
        for index in np.flatnonzero(lengths > 1):
            token, length, start = int(first_token[index]), int(lengths[index]), int(starts[index])
            used = -(-(start + length) // block_size)
            table = tables[first_block[index] : first_block[index] + used]
            prefill.append(
                PrefillSegment(
                    tokens=slice(token, token + length),
                    start=start,
                    blocks=torch.from_numpy(table).to(device),
                )
            )
        return cls(
            block_size=block_size,
            num_tokens=num_tokens,
            token_blocks=torch.from_numpy(token_blocks).to(device),
            token_offsets=torch.from_numpy(positions % block_size).to(device),
            decode=decode if len(single) else None,
            prefill=tuple(prefill),
        )

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()` once a step: for what depends on more than the segments (a window, head
        counts, the pool's layout) but is the same in many layers."""
        if key not in self._shared:
            self._shared[key] = make()
        value: T = self._shared[key]
        return value
