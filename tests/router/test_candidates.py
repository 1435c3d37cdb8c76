"""What policies are told of a replica."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.candidates import Typical, candidates
from router.load_book import LoadBook, Work
from router.policies.policy import Candidate
from router.prefix_index import NO_HIT, Hit, PrefixIndex
from router.replica_states import ReplicaStates
from tests.router.feeds import ENGINE, LOAD, Feed

WORK = Work(prefill_tokens=100, choices=1, output_tokens=20)


def seen(feed: Feed, book: LoadBook, hit: Hit = NO_HIT, *, believe: bool = True) -> Candidate:
    state = feed.states.get(feed.replica)
    assert state is not None
    known = {feed.replica: state} if believe else {}
    return candidates([feed.replica], known, {feed.replica: hit}, book, WORK)[0]


def feed(**load: float) -> Feed:
    it = ReplicaStates(PrefixIndex(100))
    return Feed(it, "r", load=replace(LOAD, **load)).connect(0.0)  # type: ignore[arg-type]


def test_reports_and_bookings_add_up() -> None:
    it, book = feed(queued_tokens=50, running=2, waiting=1, expected_tokens=30), LoadBook()
    book.book("call", "r", Work(40, 1, 10), now=0.0)
    found = seen(it, book)
    assert (found.queued_tokens, found.running, found.in_flight) == (90, 3, 4)
    assert found.filled_tokens == 0 + 90 + 100 + 30 + 10 + 20


def test_what_a_report_contains_is_not_counted_again() -> None:
    it, book = feed(), LoadBook()
    book.book("call", "r", Work(40, 1, 10), now=0.0)
    book.routed("call", "r", now=0.0)
    it.step(1.0, queued_tokens=40, waiting=1)
    it.step(2.0, queued_tokens=30, running=1, waiting=0)
    found = seen(it, book)
    assert (found.queued_tokens, found.running, found.in_flight) == (30, 1, 1)


def test_a_stale_one_is_judged_by_bookings_alone() -> None:
    it, book = feed(queued_tokens=500, running=20), LoadBook()
    book.book("call", "r", Work(40, 2, 10), now=0.0)
    found = seen(it, book, Hit(5, 0), believe=False)
    assert (found.fresh, found.queued_tokens, found.running) == (False, 40, 2)
    assert (found.device_tokens, found.uncached_tokens) == (0, 100)


@pytest.mark.parametrize(
    ("hit", "tokens"),
    [
        (Hit(0, 0), (0, 0, 100)),
        (Hit(2, 0), (32, 0, 68)),
        (Hit(2, 3), (32, 48, 20)),
        (Hit(7, 0), (99, 0, 1)),
        (Hit(4, 3), (64, 35, 1)),
    ],
)
def test_one_token_is_always_computed(hit: Hit, tokens: tuple[int, int, int]) -> None:
    found = seen(feed(), LoadBook(), hit)
    assert (found.device_tokens, found.host_tokens, found.uncached_tokens) == tokens


def test_rates_are_a_tokens_share_of_a_blocks_bytes() -> None:
    found = seen(feed(read_bytes_per_s=500_000.0, written_bytes_per_s=250_000.0), LoadBook())
    assert (found.read_tokens_per_s, found.written_tokens_per_s) == (8000, 4000)
    it = ReplicaStates(PrefixIndex(100))
    without = Feed(it, "r", engine=replace(ENGINE, host_blocks=0)).connect(0.0)
    assert seen(without, LoadBook()).written_tokens_per_s == 0


def test_what_was_not_measured_is_taken_from_the_others() -> None:
    it = ReplicaStates(PrefixIndex(100))
    Feed(it, "a", load=replace(LOAD, prefill_tokens_per_s=900.0)).connect()
    Feed(it, "b", load=replace(LOAD, prefill_tokens_per_s=1100.0)).connect()
    Feed(it, "c", load=replace(LOAD, prefill_tokens_per_s=0.0)).connect()
    states = {name: state for name in "abc" if (state := it.get(name)) is not None}
    found = candidates([*"abc"], states, {}, LoadBook(), WORK)
    assert [each.prefill_tokens_per_s for each in found] == [900, 1100, 1000]
    assert min(Typical.of([])[:3]) > 0


def test_what_a_choice_adds_to_a_step_is_the_mean_of_all_that_measured_it() -> None:
    states = ReplicaStates(PrefixIndex(100))
    for name, choice_s in (("a", 0.001), ("b", 0.003), ("c", 0.0)):
        Feed(states, name, load=replace(LOAD, decode_choice_s=choice_s)).connect(0.0)
    known = {name: state for name in "abc" if (state := states.get(name)) is not None}
    found = candidates([*"abcd"], known, {}, LoadBook(), WORK)
    assert [each.decode_choice_s for each in found] == [pytest.approx(0.002)] * 4


def test_what_a_choice_adds_is_guessed_from_the_step_where_nobody_measured_it() -> None:
    assert seen(feed(running=36), LoadBook()).decode_choice_s == pytest.approx(0.02 / 100)
