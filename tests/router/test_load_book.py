"""The load book: what is booked is released once, whatever happens to the request."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.load_book import UNROUTED_LIFETIME_S, LoadBook


class LoadBookMachine(RuleBasedStateMachine):
    """Against a plain dict of bookings."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LoadBook()
        self.now = 0.0
        self.model: dict[str, tuple[str, int, float, bool]] = {}

    ids = st.sampled_from("abcdef")
    replicas = st.sampled_from(["r0", "r1", "r2"])

    @rule(request=ids, replica=replicas, tokens=st.integers(0, 1000))
    def book_it(self, request: str, replica: str, tokens: int) -> None:
        self.book.book(request, replica, tokens, self.now)
        self.model[request] = (replica, tokens, self.now, False)

    @rule(request=ids)
    def confirm(self, request: str) -> None:
        self.book.confirm(request)
        if request in self.model:
            self.model[request] = (*self.model[request][:3], True)

    @rule(request=ids)
    def release(self, request: str) -> None:
        self.book.release(request)
        self.model.pop(request, None)

    @rule(seconds=st.floats(0, 2 * UNROUTED_LIFETIME_S))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        self.book.expire(self.now)
        self.model = {
            request: booking
            for request, booking in self.model.items()
            if booking[3] or self.now - booking[2] <= UNROUTED_LIFETIME_S
        }

    @rule(replica=replicas)
    def drop(self, replica: str) -> None:
        self.book.drop(replica)
        self.model = {r: b for r, b in self.model.items() if b[0] != replica}

    @invariant()
    def counts_agree(self) -> None:
        for replica in ("r0", "r1", "r2"):
            booked = [b for b in self.model.values() if b[0] == replica]
            assert self.book.requests(replica) == len(booked)
            assert self.book.tokens(replica) == sum(b[1] for b in booked)


TestLoadBook = LoadBookMachine.TestCase
