"""The decode plan covers each position that a row sees exactly once."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention_batch import AttentionBatch, Segment
from kernels.decode_plan import MAX_PADDING, DecodeGroup, plan_decode

CPU = torch.device("cpu")


def seen_positions(group: DecodeGroup, row: int, table: list[int], block_size: int) -> list[int]:
    """The positions whose scores the row keeps, as the plan has them."""
    kept = np.ones(group.width * block_size, dtype=bool)
    bound = group.bound[row, 0].numpy()
    assert set(np.unique(bound)) <= {-np.inf, np.inf}
    kept[group.hidden_from :] = bound == np.inf
    positions = []
    for pair in np.flatnonzero(group.rows == row):
        first = table.index(int(group.blocks[pair])) * block_size
        column = slice(group.columns[pair] * block_size, (group.columns[pair] + 1) * block_size)
        positions += [first + int(offset) for offset in np.flatnonzero(kept[column])]
        kept[column] = False
    assert not kept.any(), "a column without a block is not hidden"
    return positions


@given(
    positions=st.lists(st.integers(0, 200), min_size=1, max_size=12),
    block_size=st.sampled_from([1, 3, 8, 16, 64]),
    window=st.one_of(st.none(), st.integers(1, 80)),
    shared=st.integers(0, 3),
)
def test_each_seen_position_is_covered_exactly_once(
    positions: list[int], block_size: int, window: int | None, shared: int
) -> None:
    tables = [
        [block if block < shared else 1000 * row + block for block in range(p // block_size + 1)]
        for row, p in enumerate(positions)
    ]
    segments = [Segment(p, 1, table) for p, table in zip(positions, tables, strict=True)]
    batch = AttentionBatch.build(segments, block_size, "cpu")
    assert batch.decode is not None
    groups = plan_decode(batch.decode, len(positions), block_size, window, CPU)
    planned = []
    for group in groups:
        tokens = range(len(positions)) if group.tokens is None else group.tokens.tolist()
        assert group.num_rows == len(tokens)
        order = group.rows * group.width + group.columns
        assert (np.diff(order) > 0).all(), "pairs are sorted and none comes twice"
        for row, token in enumerate(tokens):
            planned.append(token)
            last = positions[token]
            oldest = 0 if window is None else max(0, last - window + 1)
            seen = seen_positions(group, row, tables[token], block_size)
            assert seen == list(range(oldest, last + 1))
        assert group.num_rows * group.width <= max(MAX_PADDING * len(group.rows), len(group.rows))
    assert sorted(planned) == list(range(len(positions)))


def test_rows_of_one_length_are_one_group_and_mask_only_their_last_block() -> None:
    segments = [Segment(20 + row, 1, [3 * row + 1, 3 * row + 2, 3 * row + 3]) for row in range(3)]
    batch = AttentionBatch.build(segments, 8, "cpu")
    assert batch.decode is not None
    (group,) = plan_decode(batch.decode, 3, 8, None, CPU)
    assert group.tokens is None
    assert group.full
    assert group.hidden_from == 21
    assert group.bound.shape == (3, 1, 3)


def test_one_long_row_does_not_pad_many_short_ones() -> None:
    lengths = [512, *[8] * 20, 16]
    segments = [Segment(n - 1, 1, range(1, n // 8 + 1)) for n in lengths]
    batch = AttentionBatch.build(segments, 8, "cpu")
    assert batch.decode is not None
    groups = plan_decode(batch.decode, len(lengths), 8, None, CPU)
    assert [(group.num_rows, group.width) for group in groups] == [(20, 1), (1, 2), (1, 64)]
    assert all(group.tokens is not None for group in groups)


def test_blocks_outside_the_window_are_skipped() -> None:
    batch = AttentionBatch.build([Segment(40, 1, range(1, 7))], 8, "cpu")
    assert batch.decode is not None
    (group,) = plan_decode(batch.decode, 1, 8, 9, CPU)
    assert group.blocks.tolist() == [5, 6]
