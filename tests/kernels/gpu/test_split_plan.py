"""Each token of each row is in exactly one work item, and no plan outgrows its bucket."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.gpu.split_plan import MAX_ROW_ITEMS, MIN_CHUNK, SplitPolicy, max_items, plan_splits

LONGEST = 300_000


@st.composite
def rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """(first, end): empty rows, contexts that end on multiples of a chunk, windows."""
    lengths = st.one_of(
        st.just(0),
        st.integers(1, 700),
        st.integers(1, 8).map(lambda chunks: chunks * MIN_CHUNK),
        st.integers(1, LONGEST),
    )
    ends = np.array(draw(st.lists(lengths, max_size=40)), dtype=np.int64)
    window = draw(st.one_of(st.none(), st.integers(1, 9000)))
    first = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    return first, ends


policies = st.builds(SplitPolicy, max_items=st.integers(1, 300), deterministic=st.booleans())


@given(rows(), policies)
def test_each_token_is_in_one_item(
    spans: tuple[np.ndarray, np.ndarray], policy: SplitPolicy
) -> None:
    first, end = spans
    plan = plan_splits(first, end, policy)
    assert plan.items.dtype == plan.row_parts.dtype == np.int32
    by_part = plan.items[np.argsort(plan.items[:, 3])]
    assert (by_part[:, 3] == np.arange(len(by_part))).all()
    for row in range(len(end)):
        own = by_part[plan.row_parts[row] : plan.row_parts[row + 1]]
        assert (own[:, 0] == row).all()
        tokens = [token for _, begin, stop, _ in own for token in (begin, stop)]
        if first[row] == end[row]:
            assert not tokens
            continue
        assert (tokens[0], tokens[-1]) == (first[row], end[row])
        assert tokens[1:-1:2] == tokens[2::2], "an item begins where the one before ends"
        assert (own[:, 1] < own[:, 2]).all()
    assert plan.row_parts[0] == 0
    assert plan.row_parts[-1] == len(plan.items)


@given(rows(), policies)
def test_a_plan_fits_its_bucket(spans: tuple[np.ndarray, np.ndarray], policy: SplitPolicy) -> None:
    first, end = spans
    most = max_items(len(end), LONGEST, policy)
    assert len(plan_splits(first, end, policy).items) <= most
    if policy.deterministic:
        assert most <= len(end) * MAX_ROW_ITEMS
    else:
        assert most <= max(len(end), policy.max_items)


@given(rows(), policies)
def test_the_longest_items_come_first(
    spans: tuple[np.ndarray, np.ndarray], policy: SplitPolicy
) -> None:
    items = plan_splits(*spans, policy).items
    assert (np.diff(items[:, 2] - items[:, 1]) <= 0).all()


@given(rows(), st.data())
def test_a_deterministic_row_is_cut_alike_whatever_is_beside_it(
    spans: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    first, end = spans
    if not len(end):
        return
    row = data.draw(st.integers(0, len(end) - 1))
    alone = plan_splits(first[row : row + 1], end[row : row + 1], SplitPolicy(7, True)).items
    among = plan_splits(first, end, SplitPolicy(300, True)).items
    mine = among[among[:, 0] == row]
    assert (alone[:, 1:3] == mine[:, 1:3]).all()


@pytest.mark.parametrize(
    ("lengths", "allowed", "chunk"),
    [([4096], 16, 256), ([4096], 15, 512), ([4096] * 64, 132, 2048), ([1024] * 200, 132, 1024)],
)
def test_the_chunk_is_the_smallest_power_of_two_that_is_allowed(
    lengths: list[int], allowed: int, chunk: int
) -> None:
    ends = np.array(lengths)
    items = plan_splits(np.zeros_like(ends), ends, SplitPolicy(allowed)).items
    assert (items[:, 2] - items[:, 1] == chunk).all()


@pytest.mark.parametrize(("first", "end"), [(-1, 4), (5, 4)])
def test_rows_are_no_negative_spans(first: int, end: int) -> None:
    with pytest.raises(ValueError, match="0 <= first <= end"):
        plan_splits(np.array([first]), np.array([end]), SplitPolicy(4))
