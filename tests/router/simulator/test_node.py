"""Replicas of a machine and their neighbours' host tiers."""

from __future__ import annotations

from replicas.core.block_transfer import Restore
from replicas.core.host_tier import HostTier
from router.simulator.node import Node

A, B = b"a", b"b"


def filled(*digests: bytes) -> HostTier:
    tier = HostTier(4)
    for digest in digests:
        tier.reserve(digest)
        tier.keep(digest)
        tier.commit(digest)
    return tier


def test_a_neighbours_block_is_found_and_the_own_one_is_not() -> None:
    node, own, other = Node("node"), filled(A), filled(B)
    find, find_from_other = node.join(own), node.join(other)
    assert find(A) is None, "the offloader looks into its own tier itself"
    assert find(B) == (2, other.lookup(B))
    assert find_from_other(A) == (1, own.lookup(A))
    assert find(b"c") is None


def test_a_block_that_is_being_written_is_not_found() -> None:
    node, other = Node("node"), HostTier(4)
    find = node.join(HostTier(4))
    node.join(other)
    other.reserve(A)
    assert find(A) is None
    other.commit(A)


def test_what_went_while_it_was_read_is_noticed() -> None:
    node, other = Node("node"), filled(A)
    find = node.join(HostTier(4))
    node.join(other)
    source = find(A)
    assert source is not None
    restore = Restore(source, block=1, digest=A)
    assert node.holds(restore)
    other.discard(A)
    assert not node.holds(restore)
    assert node.holds(Restore((0, 0), block=1, digest=A)), "the own tier keeps what is read"
