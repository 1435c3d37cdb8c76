"""The load book: what is booked is released once, and no request is left out or counted twice."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.load_book import TRAVEL_S, UNROUTED_LIFETIME_S, LoadBook, Work

REPLICAS = ["r0", "r1", "r2"]


@dataclass
class Booking:
    replica: str
    work: Work
    booked_at: float
    routed_at: float | None = None
    shown: bool = False
    in_doubt: bool = False

    @property
    def counts(self) -> bool:
        return self.routed_at is not None or not self.in_doubt


class LoadBookMachine(RuleBasedStateMachine):
    """Against a plain dict of bookings."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LoadBook()
        self.now = 0.0
        self.model: dict[str, Booking] = {}

    ids = st.sampled_from("abcdef")
    replicas = st.sampled_from(REPLICAS)
    works = st.builds(Work, st.integers(1, 1000), st.integers(1, 3), st.integers(0, 50), st.just(1))

    @rule(call=ids, replica=replicas, work=works)
    def book_it(self, call: str, replica: str, work: Work) -> None:
        self.book.book(call, replica, work, self.now)
        self.model[call] = Booking(replica, work, self.now)

    @rule(call=ids, replica=replicas)
    def routed(self, call: str, replica: str) -> None:
        self.book.routed(call, replica, self.now)
        booking = self.model.get(call)
        if booking is not None and booking.routed_at is None:
            booking.replica, booking.routed_at = replica, self.now

    @rule(call=ids, replica=replicas)
    def ended(self, call: str, replica: str) -> None:
        """Serve tells the end of a try."""
        sure = self.book.release(call, replica)
        booking = self.model.get(call)
        if booking is None or booking.replica != replica or not booking.counts:
            assert sure == (booking is None)
        elif booking.routed_at is None:
            assert not sure
            booking.in_doubt = True
        else:
            assert sure
            del self.model[call]

    @rule(replica=replicas, ago=st.floats(0, 1))
    def settle(self, replica: str, ago: float) -> None:
        self.book.unseen(replica, self.now - ago)
        for booking in self.model.values():
            if booking.replica == replica and booking.routed_at is not None:
                booking.shown |= booking.routed_at + TRAVEL_S <= self.now - ago

    @rule(call=ids)
    def release(self, call: str) -> None:
        self.book.release(call)
        self.model.pop(call, None)

    @rule(seconds=st.floats(0, 1) | st.floats(0, 2 * UNROUTED_LIFETIME_S))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        self.book.expire(self.now)
        self.model = {
            call: booking
            for call, booking in self.model.items()
            if (booking.routed_at is not None and not booking.in_doubt)
            or self.now - booking.booked_at <= UNROUTED_LIFETIME_S
        }

    @rule(replica=replicas)
    def drop(self, replica: str) -> None:
        self.book.drop(replica)
        self.model = {c: b for c, b in self.model.items() if b.replica != replica or not b.counts}

    @invariant()
    def sums_agree(self) -> None:
        counted = [b for b in self.model.values() if b.counts]
        assert len(self.book) == len(counted)
        assert [call in self.book for call in "abcdef"] == [c in self.model for c in "abcdef"]
        for replica in REPLICAS:
            booked = [b for b in counted if b.replica == replica]
            assert self.book.all(replica) == total([b.work for b in booked])
            unseen = [b.work for b in booked if not b.shown]
            assert self.book.unseen(replica, before=-1.0) == total(unseen)
            assert self.book.requests(replica) == len(booked)


TestLoadBook = LoadBookMachine.TestCase


def total(works: list[Work]) -> Work:
    if not works:
        return Work(requests=0)
    return Work(*(sum(column) for column in zip(*works, strict=True)))


@dataclass
class Replica:
    """Takes in what has arrived, works for a while, reports what it has: again and again.

    It finishes nothing, so that what it has is what it was sent.
    """

    queue: list[tuple[float, str]] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def step(self, begin: float) -> None:
        self.known |= {call for arrival, call in self.queue if arrival <= begin}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("step_s", [0.005, 0.1, 2.0])
def test_no_request_is_left_out_and_none_counted_twice_for_long(seed: int, step_s: float) -> None:
    """At any time a request is in the replica's last report, or unseen, or both: the latter only
    while one report after its acceptance is awaited."""
    rng = random.Random(seed)
    book, replica = LoadBook(), Replica()
    now, previous_at, received_at = 0.0, -1.0, 0.0
    routed: dict[str, float] = {}
    reported: set[str] = set()
    for number in range(200):
        begin, now = now, now + rng.uniform(0.2, 1.0) * step_s
        replica.step(begin)
        times = sorted(rng.uniform(begin, now) for _ in range(rng.choice([0, 0, 1, 3])))
        for sent, at in enumerate(times):
            call = f"{number}.{sent}"
            book.book(call, "r", Work(10, 1, 5), at)
            replica.queue.append((at + rng.uniform(0, 0.9) * TRAVEL_S, call))
            book.routed(call, "r", at)
            routed[call] = at
        previous_at, received_at = received_at, now
        reported = set(replica.known)
        book.unseen("r", previous_at)
        unseen = {call for call in routed if _is_unseen(book, call)}
        assert reported | unseen == routed.keys()
        for call in reported & unseen:
            assert routed[call] + TRAVEL_S > previous_at
    assert len(routed) > 100


def _is_unseen(book: LoadBook, call: str) -> bool:
    return not book._bookings[call].shown


def test_a_booking_counts_until_the_second_report_after_its_acceptance() -> None:
    book = LoadBook()
    book.book("a", "r", Work(100, 1, 10), now=0.0)
    assert book.unseen("r", before=5.0).prefill_tokens == 100, "nobody accepted it yet"
    book.routed("a", "r", now=1.0)
    assert book.unseen("r", before=1.0).prefill_tokens == 100, (
        "the report may be from before its arrival"
    )
    assert book.unseen("r", before=1.0 + TRAVEL_S).prefill_tokens == 0
    assert book.requests("r") == 1
    book.release("a")
    assert (book.unseen("r", before=3.0), book.all("r")) == (Work(requests=0), Work(requests=0))


def test_a_call_that_went_elsewhere_counts_there() -> None:
    book = LoadBook()
    book.book("a", "r0", Work(100, 1, 10), now=0.0)
    book.routed("a", "r1", now=1.0)
    assert (book.requests("r0"), book.requests("r1")) == (0, 1)
    assert book.unseen("r1", before=2.0).prefill_tokens == 0


def test_the_end_at_a_replica_that_refused_does_not_release_what_is_booked_elsewhere() -> None:
    book = LoadBook()
    book.book("one", "a", Work(10, 1, 5), 0.0)
    book.book("one", "b", Work(10, 1, 5), 0.1)
    assert not book.release("one", "a")
    assert [book.requests(replica) for replica in "ab"] == [0, 1]
    book.routed("one", "b", 0.2)
    assert book.release("one", "b")
    assert (len(book), "one" in book) == (0, False)


def test_a_call_that_is_refused_and_sent_there_again_counts_once_it_is_accepted() -> None:
    """The end of the refused try is told after the second booking."""
    book = LoadBook()
    for at in (0.0, 0.1):
        book.book("one", "a", Work(10, 1, 5), at)
    assert not book.release("one", "a")
    assert book.requests("a") == 0, "it may have been cancelled"
    book.routed("one", "a", 0.2)
    assert (book.requests("a"), book.unseen("a", before=0.0).prefill_tokens) == (1, 10)
    assert book.release("one", "a")
    assert (len(book), "one" in book) == (0, False)


def test_a_call_that_ends_before_it_is_known_to_be_accepted_does_not_count_for_ever() -> None:
    book = LoadBook()
    book.book("one", "a", Work(10, 1, 5), 0.0)
    book.release("one", "a")
    book.routed("one", "a", 0.1)
    book.expire(UNROUTED_LIFETIME_S)
    assert book.requests("a") == 1
    book.expire(UNROUTED_LIFETIME_S + 0.1)
    assert (book.all("a"), "one" in book) == (Work(requests=0), False)


def test_nothing_is_left_of_calls_at_a_replica_that_reports_nothing() -> None:
    """Nobody asks what such a replica has not seen yet."""
    book = LoadBook()
    book.book("long", "a", Work(10, 1, 5), 0.0)
    book.routed("long", "a", 0.0)
    for number in range(1000):
        call, now = str(number), number * 0.1
        book.book(call, "a", Work(10, 1, 5), now)
        book.routed(call, "a", now)
        book.release(call, "a")
        book.expire(now)
    assert (book.requests("a"), len(book._pages["a"].arriving), len(book._unrouted)) == (1, 1, 0)
