"""Which batch sizes are captured, and which one a batch takes."""

from __future__ import annotations

import pytest

from replicas.engine.graph_buckets import LARGEST, bucket_for, buckets


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 4)),
        (8, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 16)),
        (30, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_buckets_go_up_to_the_first_that_holds_all_rows(max_rows, expected) -> None:
    assert buckets(max_rows) == expected


def test_no_bucket_is_larger_than_the_largest() -> None:
    assert buckets(256) == buckets(4096)
    assert len(buckets(256)) == 3 + 32
    assert buckets(256)[-1] == LARGEST == 256


def test_a_batch_takes_the_smallest_bucket_that_holds_it() -> None:
    sizes = buckets(256)
    for rows in range(1, 257):
        bucket = bucket_for(rows, sizes)
        assert bucket is not None
        assert bucket >= rows
        assert all(size < rows for size in sizes if size < bucket)
    assert bucket_for(257, sizes) is None
    assert bucket_for(1, ()) is None
