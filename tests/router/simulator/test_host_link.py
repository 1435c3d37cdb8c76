"""Copies to and from the host, in time."""

from __future__ import annotations

from replicas.core.block_transfer import Restore, Save
from router.simulator.host_link import HostLink


def save(block: int) -> Save:
    return Save(block=block, slot=block, digest=bytes([block]))


def restore(block: int) -> Restore:
    return Restore(source=(0, block), block=block, digest=bytes([block]))


def test_copies_of_a_direction_follow_each_other_and_directions_do_not_wait() -> None:
    link = HostLink(copy_s=2.0)
    link.start((save(1), save(2), restore(3)), now=10.0)
    assert link.next_end() == 12.0
    assert [each.copy.block for each in link.ended(12.0)] == [1, 3]
    link.start((restore(4),), now=13.0)
    assert link.next_end() == 14.0
    assert link.ended(13.9) == []
    assert [each.copy.block for each in link.ended(20.0)] == [2, 4]
    assert link.next_end() is None


def test_a_copy_says_what_it_took_itself() -> None:
    link = HostLink(copy_s=2.0)
    link.start((save(1), save(2)), now=0.0)
    assert [(each.ok, each.seconds) for each in link.ended(100.0)] == [(True, 2.0)] * 2


def test_a_copy_queued_after_a_pause_begins_at_once() -> None:
    link = HostLink(copy_s=2.0)
    link.start((save(1),), now=0.0)
    link.ended(50.0)
    link.start((save(2),), now=50.0)
    assert link.next_end() == 52.0


def test_a_restore_of_what_has_gone_fails() -> None:
    link = HostLink(copy_s=2.0, intact=lambda copy: copy.block == 4)
    link.start((save(1), restore(3), restore(4)), now=0.0)
    assert [(each.copy.block, each.ok) for each in link.ended(4.0)] == [
        (1, True),
        (3, False),
        (4, True),
    ]
