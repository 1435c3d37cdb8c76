"""Looking ahead: what running choices will need counts before they need it."""

from __future__ import annotations

import pytest

from replicas.core.admission import OutputLengths, _peak
from tests.replicas.core.builders import make_request
from tests.replicas.core.harness import Replica
from tests.replicas.core.test_scheduler_preemption import own_prompts


def brute_force_peak(alive: list[tuple[float, int]]) -> float:
    """Tokens held by those not yet ended, step by step."""
    last = int(max(remaining for remaining, _ in alive))
    return max(
        sum(tokens + t for remaining, tokens in alive if remaining >= t) for t in range(last + 1)
    )


@pytest.mark.parametrize(
    "alive",
    [
        [(5.0, 10)],
        [(5.0, 10), (5.0, 10)],
        [(1.0, 100), (50.0, 3), (20.0, 7)],
        [(0.0, 4), (9.0, 1), (3.0, 30), (3.0, 2)],
    ],
)
def test_the_peak_is_that_of_a_simulation(alive: list[tuple[float, int]]) -> None:
    assert _peak(alive, slack=0.0) == brute_force_peak(alive)


def test_the_remaining_length_is_the_mean_beyond_what_there_is() -> None:
    lengths = OutputLengths()
    for length in [10] * 20 + [50] * 20:
        lengths.observe(length)
    assert lengths.expected_remaining(0, 1000) == 30
    assert lengths.expected_remaining(10, 1000) == 40
    assert lengths.expected_remaining(10, 25) == 15, "max_tokens bounds it"
    assert lengths.expected_remaining(400, 1000) == 400, "it outlived all that were seen"


def test_before_there_are_observations_a_guess_has_to_do() -> None:
    assert OutputLengths().expected_remaining(0, 64) == 64
    assert 0 < OutputLengths().expected_remaining(0, 100_000) < 1000


def test_old_observations_fade() -> None:
    lengths = OutputLengths()
    for length in [1000] * 300 + [10] * 256:
        lengths.observe(length)
    assert lengths.expected_remaining(0, 10_000) == 10


@pytest.mark.parametrize("look_ahead", [False, True])
def test_looking_ahead_avoids_preemptions(look_ahead: bool) -> None:
    replica = Replica(40, look_ahead=look_ahead)
    replica.submit(*own_prompts(12, 9, max_tokens=30))
    replica.run()
    assert (replica.scheduler.stats.preemptions == 0) is look_ahead


def test_looking_ahead_fills_the_pool_all_the_same() -> None:
    replica = Replica(40, look_ahead=True)
    replica.submit(*own_prompts(12, 9, max_tokens=30))
    replica.step()
    # Each of them will hold 39 tokens: 10 blocks.
    assert len(replica.scheduler.running) == 3


def test_overcommitting_admits_more() -> None:
    replica = Replica(40, look_ahead=True, overcommit=0.25)
    replica.submit(*own_prompts(12, 9, max_tokens=30))
    replica.step()
    assert len(replica.scheduler.running) == 4
    replica.run()


def test_who_runs_alone_needs_no_foresight() -> None:
    replica = Replica(4, look_ahead=True)
    replica.submit(make_request("long", range(7), max_tokens=1000))
    replica.run()
    assert len(replica.outputs["long", 0]) == 4 * 4 + 1 - 7


def test_after_a_preemption_new_ones_wait_for_more_room() -> None:
    replica = Replica(20, hysteresis=0.5, caching=False)
    replica.submit(*own_prompts(5, 12, max_tokens=16))
    while not replica.scheduler.stats.preemptions:
        replica.step()
    replica.submit(make_request("new", [1, 2, 3], max_tokens=2))
    for key in list(replica.outputs):
        if key[0] in ("r3", "r4"):
            replica.abort(key[0])
    replica.scheduler.admission.note_preemption()
    replica.step()
    free = replica.scheduler.kv.pool.num_free
    assert 1 <= free < 10
    assert "new" in {c.request.id for c in replica.scheduler.waiting}
    replica.run()


@pytest.mark.parametrize(("ends", "holds"), [("waits", True), ("r0", False)])
def test_only_the_end_of_a_running_choice_ends_the_hysteresis(ends: str, holds: bool) -> None:
    replica = Replica(20, hysteresis=0.5, caching=False)
    replica.submit(*own_prompts(5, 12, max_tokens=16))
    while not replica.scheduler.stats.preemptions:
        replica.step()
    replica.submit(make_request("waits", [1, 2, 3], max_tokens=2))
    replica.submit(make_request("new", [1, 2, 3], max_tokens=2))
    replica.abort(ends)
    assert replica.scheduler.admission.reserve(replica.choice("new")) == (10 if holds else 0)
    replica.run()
