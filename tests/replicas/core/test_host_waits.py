"""Pins, arrivals and what comes late: nobody keeps more of the host, or waits longer, than due."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from replicas.core.block_transfer import Restore
from replicas.core.host_tier import HostTier
from replicas.core.request import ChoiceState
from tests.replicas.core.builders import make_request
from tests.replicas.core.harness import BOTH_DEPTHS, ONE_STEP, Replica

pytestmark = BOTH_DEPTHS

PROMPT = range(1000, 1041)
"""Ten full blocks and one more token."""


def make_replica(num_blocks: int, host_slots: int, **options: Any) -> Replica:
    """Copies cost nothing, so that what can be kept and restored is."""
    return Replica(num_blocks, 4, host_slots=host_slots, copy_s=0.0, **options)


def host(replica: Replica) -> HostTier:
    assert replica.scheduler.kv.offloader is not None
    return replica.scheduler.kv.offloader.tier


def only_on_host(**options: Any) -> Replica:
    """The prompt's blocks are in the host tier and have gone from the device."""
    replica = make_replica(24, 40, **options)
    prompts = {"first": PROMPT, "hits it": PROMPT, "evicts it": range(5000, 5093)}
    for name, prompt in prompts.items():
        replica.submit(make_request(name, prompt, max_tokens=1))
        replica.run()
    assert host(replica).num_used == 10
    assert not any(map(replica.scheduler.kv.pool.lookup, host(replica).digests))
    return replica


def restores(replica: Replica) -> int:
    return sum(isinstance(copy, Restore) for step in replica.steps for copy in step.host_copies)


def step_until(replica: Replica, done: Callable[[], bool], limit: int = 1000) -> int:
    """Gives the number of steps that it took."""
    for count in range(limit):
        if done():
            return count
        replica.step()
    raise AssertionError("it never came to pass")


def test_what_arrives_for_one_is_not_fetched_again_for_another() -> None:
    replica = only_on_host(copy_steps=3)
    before = restores(replica)
    replica.submit(*(make_request(name, PROMPT, max_tokens=1) for name in ("a", "b")))
    choices = [replica.choice(name) for name in ("a", "b")]
    replica.run()
    assert restores(replica) - before == 10
    assert [c.host_cached_tokens for c in choices] == [40, 0]
    assert [c.cached_tokens for c in choices] == [0, 40]


def test_nobody_waits_for_another_s_restore_longer_than_for_an_own_one() -> None:
    replica = only_on_host(patience=3.0)
    replica.host.copy_steps = 500  # from now on
    replica.submit(make_request("a", PROMPT, max_tokens=1))
    replica.step()
    assert replica.choice("a").arriving
    replica.abort("a")
    replica.submit(make_request("b", PROMPT, max_tokens=1), make_request("c", [7, 8], max_tokens=1))
    assert step_until(replica, lambda: ("c", 0) in replica.last) < 12
    replica.run()


def test_a_late_restore_is_computed_and_not_asked_for_again() -> None:
    replica = only_on_host(patience=3.0)
    replica.host.copy_steps = 50
    before = restores(replica)
    replica.submit(make_request("a", PROMPT, max_tokens=1))
    choice = replica.choice("a")
    assert step_until(replica, lambda: ("a", 0) in replica.last) < 8
    assert restores(replica) - before == 10
    assert choice.host_cached_tokens == 0
    replica.run()


@pytest.mark.parametrize("fails", [True, False])
def test_a_late_restore_counts_as_failed_once_however_it_ends(fails: bool) -> None:
    broken = False
    replica = only_on_host(patience=3.0, copy_fails=lambda: broken)
    replica.host.copy_steps = 20
    replica.submit(make_request("a", PROMPT, max_tokens=1))
    step_until(replica, lambda: ("a", 0) in replica.last)
    assert replica.scheduler.stats.failed_copies == 10
    broken = fails
    replica.run()
    assert replica.scheduler.stats.failed_copies == 10


def test_a_block_of_a_late_restore_is_like_any_other_when_that_has_ended() -> None:
    """A copy that fails in one of them counts again."""
    broken = False
    replica = only_on_host(patience=3.0, copy_fails=lambda: broken)
    replica.host.copy_steps = 20
    replica.submit(make_request("a", PROMPT, max_tokens=1))
    replica.run()
    replica.host.copy_steps, broken = 0, True
    for name in ("fills all", "hits that", "goes on"):
        prompt = range(9000, 9093) if name == "goes on" else range(7000, 7093)
        replica.submit(make_request(name, prompt, max_tokens=1))
        replica.run()
    assert replica.scheduler.stats.failed_copies == 10 + 23


@ONE_STEP
def test_who_is_preempted_before_it_has_its_blocks_back_keeps_them_on_the_host() -> None:
    replica = make_replica(6, 2, caching=False)
    replica.submit(
        make_request("leader", range(7), max_tokens=12),
        make_request("short", range(20, 27), max_tokens=4),
        make_request("victim", range(50, 57), max_tokens=12),
    )
    victim = replica.choice("victim")
    step_until(replica, lambda: victim.preemptions == 1)
    replica.host.copy_steps = 6
    step_until(replica, lambda: victim.preemptions == 2)
    assert restores(replica) == 2
    step_until(replica, lambda: replica.scheduler.num_copies == 0)
    assert victim.state is ChoiceState.WAITING
    assert host(replica).num_pinned == 2
    assert host(replica).reserve(b"another block") is None
    replica.run()
    assert (victim.restored_tokens, victim.recomputed_tokens) == (8, 0)


class Cycle:
    """Preempts one choice after the other to the host. A twin then computes all of it on the
    device again, so that what was kept is not needed."""

    def __init__(self) -> None:
        self.replica = make_replica(10, 8, by_priority=True, budget=8)
        self.rounds = 0

    def run(self, end: str) -> int:
        """One round, in which the victim is resumed, cancelled, or cancelled when it runs again;
        gives how many blocks were kept for it."""
        replica, self.rounds = self.replica, self.rounds + 1
        prompt = range(30 * self.rounds, 30 * self.rounds + 14)
        replica.submit(make_request(f"leader {self.rounds}", range(18), max_tokens=30))
        replica.submit(make_request(f"{self.rounds}", prompt, max_tokens=8))
        victim = replica.choice(f"{self.rounds}")
        step_until(replica, lambda: victim.preemptions > 0)
        kept = len(victim.host_blocks)
        replica.abort(f"leader {self.rounds}")
        known = [*victim.tokens(0, victim.num_known_tokens), 1, 2, 3, 4, 5, 6, 7, 8]
        twin = known[: len(known) // 8 * 8]
        replica.submit(make_request(f"twin {self.rounds}", twin, max_tokens=1, priority=-1))
        if end == "cancelled":
            replica.abort(victim.request.id)
        elif end == "cancelled later":
            step_until(replica, lambda: victim.state is ChoiceState.RUNNING)
            replica.abort(victim.request.id)
        step_until(replica, lambda: not replica.has_work)
        assert victim.restored_tokens == 0, "the twin was to bring it all back"
        return kept


@ONE_STEP
def test_what_was_kept_is_freed_when_it_is_not_needed() -> None:
    """O30: preempted to the host, found on the device, then resumed, cancelled or finished, five
    hundred times; the last swap-out works like the first."""
    cycle, kept = Cycle(), []
    for _ in range(125):
        for end in ("resumed", "cancelled", "resumed", "cancelled later"):
            kept.append(cycle.run(end))
            assert host(cycle.replica).num_pinned == 0
            host(cycle.replica).check_integrity()
    cycle.replica.run()
    assert min(kept) > 2
    assert len(set(kept)) == 1
