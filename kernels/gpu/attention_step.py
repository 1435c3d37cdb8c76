"""What one engine step attends to, as the Triton kernels read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention_batch import IntArray, Segment
from kernels.gpu.split_plan import SplitPolicy, max_items, plan_splits

Window = int | None
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What the host knows of a step. Equal for all steps of a graph bucket."""

    num_rows: int
    num_decode: int
    """Rows with one new token; they come first, and row b's token is token b."""
    num_tokens: int
    block_size: int
    tile_tokens: int
    """New tokens of a query tile of `attn_prefill`."""
    windows: tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A step's index arrays on the host, by name, always in this order:

    slots [T] int64; then int32: block_table [B, P], seq_lens [B], cu_q [B + 1], tiles [M, 2], and
    for each window, w its number, items_w [N, 4], n_items_w [1], row_parts_w [num_decode + 1].
    """

    sizes: StepSizes
    arrays: dict[str, Array]


@dataclass(frozen=True, slots=True)
class WindowSplits:
    """The work items of decode rows in the layers of one window; see `split_plan`."""

    items: Tensor
    """[N, 4] int32."""
    n_items: Tensor
    """[1] int32: how many of `items` count."""
    row_parts: Tensor
    """[num_decode + 1] int32."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The ragged `[T]` batch of one step on the device."""

    sizes: StepSizes
    slots: Tensor
    """[T] int64: block * block_size + offset of each new token; negative: write nothing."""
    block_table: Tensor
    """[B, P] int32."""
    seq_lens: Tensor
    """[B] int32: tokens that a row holds with its new ones; 0 where it only fills a bucket."""
    cu_q: Tensor
    """[B + 1] int32: row b has new tokens cu_q[b] .. cu_q[b + 1] - 1."""
    tiles: Tensor
    """[M, 2] int32: row and first new token of each query tile, the costliest first."""
    splits: Mapping[Window, WindowSplits]

    @property
    def num_decode(self) -> int:
        """Rows with one new token; they come first."""
        return self.sizes.num_decode

    @property
    def num_tokens(self) -> int:
        """T, those that only fill a bucket included."""
        return self.sizes.num_tokens

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.sizes.block_size

    @classmethod
    def of(cls, sizes: StepSizes, tensors: Mapping[str, Tensor]) -> AttentionStep:
        """The step of arrays that are on the device, named as in `StepArrays`."""
        splits = {
            window: WindowSplits(
                tensors[f"items_{number}"],
                tensors[f"n_items_{number}"],
                tensors[f"row_parts_{number}"],
            )
            for number, window in enumerate(sizes.windows)
        }
        return cls(
            sizes=sizes,
            slots=tensors["slots"],
            block_table=tensors["block_table"],
            seq_lens=tensors["seq_lens"],
            cu_q=tensors["cu_q"],
            tiles=tensors["tiles"],
            splits=splits,
        )

    @classmethod
    def on(cls, step: StepArrays, device: torch.device | str) -> AttentionStep:
        """Copy a planned step to `device`, array by array."""
        moved = {name: torch.from_numpy(array).to(device) for name, array in step.arrays.items()}
        return cls.of(step.sizes, moved)


def plan_step(
    segments: Sequence[Segment],
    block_size: int,
    windows: Sequence[Window],
    *,
    max_blocks: int,
    tile_tokens: int,
    policy: SplitPolicy,
    padded_rows: int | None = None,
) -> StepArrays:
    """Index a step whose segments of one new token come first.

    `windows` are the distinct ones of the model's layers, `max_blocks` is the width P of the block
    table, `tile_tokens` is what `tiles.prefill_tile(shape).tokens(shape)` says. With `padded_rows`,
    segments all have one new token, and rows without context follow until there are so many: every
    array then has a size that depends on the other arguments alone (no segments give an empty
    bucket of that size). Raises ValueError where the segments do not fit these rules.
    """
    starts, lengths = _spans(segments)
    num_decode = int(np.count_nonzero(lengths == 1))
    if (lengths[:num_decode] != 1).any():
        raise ValueError("segments of one new token come first")
    block_table = _block_table(segments, starts + lengths, block_size, max_blocks)
    cu_q = np.concatenate(([0], lengths.cumsum()))
    rows = np.repeat(np.arange(len(segments)), lengths)
    positions = starts[rows] + np.arange(len(rows)) - cu_q[rows]
    slots = block_table[rows, positions // block_size] * block_size + positions % block_size
    seq_lens = starts + lengths
    if padded_rows is not None:
        if not num_decode == len(segments) <= padded_rows:
            raise ValueError(f"a bucket takes up to {padded_rows} segments of one new token each")
        missing, num_decode = padded_rows - num_decode, padded_rows
        block_table = np.pad(block_table, ((0, missing), (0, 0)))
        slots = np.pad(slots, (0, missing), constant_values=-1)
        seq_lens = np.pad(seq_lens, (0, missing))
        cu_q = np.arange(padded_rows + 1)
    arrays: dict[str, Array] = {
        "slots": slots,
        "block_table": block_table.astype(np.int32),
        "seq_lens": seq_lens.astype(np.int32),
        "cu_q": cu_q.astype(np.int32),
        "tiles": _query_tiles(starts, lengths, tile_tokens),
    }
    for number, window in enumerate(windows):
        end = seq_lens[:num_decode]
        first = np.zeros_like(end) if window is None else np.maximum(end - window, 0)
        splits = plan_splits(first, end, policy)
        room = len(splits.items)
        if padded_rows is not None:
            room = max_items(padded_rows, max_blocks * block_size, policy)
        items = np.zeros((room, 4), dtype=np.int32)
        items[: len(splits.items)] = splits.items
        arrays[f"items_{number}"] = items
        arrays[f"n_items_{number}"] = np.array([len(splits.items)], dtype=np.int32)
        arrays[f"row_parts_{number}"] = splits.row_parts
    sizes = StepSizes(
        num_rows=len(seq_lens),
        num_decode=num_decode,
        num_tokens=len(slots),
        block_size=block_size,
        tile_tokens=tile_tokens,
        windows=tuple(windows),
    )
    return StepArrays(sizes, arrays)


def _spans(segments: Sequence[Segment]) -> tuple[IntArray, IntArray]:
    starts = np.array([segment.start for segment in segments], dtype=np.int64)
    lengths = np.array([segment.length for segment in segments], dtype=np.int64)
    if (starts < 0).any() or (lengths < 1).any():
        raise ValueError("a segment has at least one new token and no negative start")
    return starts, lengths


def _block_table(
    segments: Sequence[Segment], seq_lens: IntArray, block_size: int, max_blocks: int
) -> IntArray:
    sizes = np.array([len(segment.blocks) for segment in segments], dtype=np.int64)
    if (sizes * block_size < seq_lens).any():
        raise ValueError("a block table does not cover its segment")
    if (sizes > max_blocks).any():
        raise ValueError(f"a block table is longer than {max_blocks} blocks")
    ids = chain.from_iterable(segment.blocks for segment in segments)
    table = np.zeros((len(segments), max_blocks), dtype=np.int64)
    table[np.arange(max_blocks) < sizes[:, None]] = np.fromiter(ids, np.int64, int(sizes.sum()))
    return table


def _query_tiles(starts: IntArray, lengths: IntArray, tile_tokens: int) -> Array:
    """[M, 2] int32 of the segments of more than one token. Those that see most come first, so that
    the last ones to run are short."""
    counts = np.where(lengths > 1, -(-lengths // tile_tokens), 0)
    rows = np.repeat(np.arange(len(lengths)), counts)
    first = (np.arange(len(rows)) - (counts.cumsum() - counts)[rows]) * tile_tokens
    order = np.argsort(-(starts[rows] + first), kind="stable")
    return np.stack((rows, first), axis=1)[order].astype(np.int32)
