"""The prefix index: exact matches, bounded memory."""

from __future__ import annotations

import random

import pytest

from router.prefix_index import PrefixIndex


def chain(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_counts_leading_blocks_only() -> None:
    index = PrefixIndex(8)
    index.insert("a", chain("1", "2", "3"))
    assert index.match("a", chain("1", "2", "x")) == 2
    assert index.match("a", chain("x", "2", "3")) == 0
    assert index.match("b", chain("1")) == 0


def test_a_chain_loses_its_tail_first() -> None:
    index = PrefixIndex(3)
    index.insert("a", chain("1", "2", "3"))
    index.insert("a", chain("4"))
    assert index.match("a", chain("1", "2", "3")) == 2


def test_drop_forgets_one_replica() -> None:
    index = PrefixIndex(8)
    index.insert("a", chain("1"))
    index.insert("b", chain("1"))
    index.drop("a")
    assert (index.match("a", chain("1")), index.match("b", chain("1"))) == (0, 1)


def test_memory_is_bounded_whatever_the_traffic() -> None:
    index, rng, seen = PrefixIndex(100), random.Random(0), []
    for _ in range(5000):
        index.insert("a", [b"head", rng.randbytes(8), rng.randbytes(8)])
        seen.append(len(index))
    assert max(seen) == 100
    index.drop("a")
    assert len(index) == 0


def test_refuses_a_capacity_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PrefixIndex(0)
