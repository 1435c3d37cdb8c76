"""The work this router has sent out and not seen the end of."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

UNROUTED_LIFETIME_S = 60.0
"""A booking that was never routed (its request was cancelled while it was placed) ends then."""
TRAVEL_S = 0.05
"""A replica that accepted a call has it in its queue within this time."""


class Work(NamedTuple):
    """What a request asks of a replica, or several requests together."""

    prefill_tokens: int = 0
    """Tokens to compute before the first output."""
    choices: int = 0
    output_tokens: int = 0
    """Of all choices, as expected."""
    requests: int = 1

    def plus(self, other: Work, sign: int = 1) -> Work:
        return Work(*(mine + sign * its for mine, its in zip(self, other, strict=True)))


NO_WORK = Work(requests=0)


@dataclass(slots=True, eq=False)
class _Booking:
    call_id: str
    replica: str
    work: Work
    booked_at: float
    routed_at: float | None = None
    shown: bool = False
    """Whether the replica's own figures contain it."""


@dataclass(slots=True)
class _Page:
    """The bookings on one replica."""

    all: Work = NO_WORK
    unseen: Work = NO_WORK
    arriving: deque[_Booking] = field(default_factory=deque)
    """Routed and perhaps not shown yet, in the order of routing."""


class LoadBook:
    """Bookings by call: made when a replica is chosen, not when the call arrives there, so that
    requests placed at the same moment see each other.

    A booking stands in for its request until the replica's own figures contain it (`unseen`), so
    that no request is left out. As nobody can know in which of two successive reports a request
    appears first, it may be counted twice in the one between; never for longer.
    """

    def __init__(self) -> None:
        self._bookings: dict[str, _Booking] = {}
        self._unrouted: deque[_Booking] = deque()
        self._pages: defaultdict[str, _Page] = defaultdict(_Page)

    def __len__(self) -> int:
        return len(self._bookings)

    def book(self, call_id: str, replica: str, work: Work, now: float) -> None:
        """Count `work` on `replica`; a second booking of a call moves it."""
        self.release(call_id)
        booking = _Booking(call_id, replica, work, now)
        self._unrouted.append(booking)
        self._enter(booking)

    def routed(self, call_id: str, replica: str, now: float) -> None:
        """`replica` has accepted the call: its end will be reported. Moves the booking there."""
        booking = self._bookings.get(call_id)
        if booking is None or booking.routed_at is not None:
            return
        if booking.replica != replica:
            self.release(call_id)
            booking = _Booking(call_id, replica, booking.work, booking.booked_at)
            self._enter(booking)
        booking.routed_at = now
        self._pages[replica].arriving.append(booking)

    def release(self, call_id: str, replica: str | None = None) -> bool:
        """The request has ended, at `replica` where that is told. False where it is booked
        elsewhere by now: a replica that refused it says that it has ended there. Unknown ones
        are fine."""
        booking = self._bookings.get(call_id)
        if booking is None:
            return True
        if replica not in (None, booking.replica):
            return False
        del self._bookings[call_id]
        page = self._pages[booking.replica]
        page.all = page.all.plus(booking.work, -1)
        if not booking.shown:
            page.unseen = page.unseen.plus(booking.work, -1)
        return True

    def expire(self, now: float) -> None:
        """Release what was booked but never routed."""
        unrouted = self._unrouted
        while unrouted and now - unrouted[0].booked_at > UNROUTED_LIFETIME_S:
            booking = unrouted.popleft()
            if booking.routed_at is None and self._bookings.get(booking.call_id) is booking:
                self.release(booking.call_id)

    def drop(self, replica: str) -> None:
        """Release all bookings on a replica that has gone."""
        for call_id in [c for c, b in self._bookings.items() if b.replica == replica]:
            self.release(call_id)
        self._pages.pop(replica, None)

    def all(self, replica: str) -> Work:
        """Everything in work on `replica`."""
        page = self._pages.get(replica)
        return NO_WORK if page is None else page.all

    def unseen(self, replica: str, before: float) -> Work:
        """That part of it which the replica's own figures may not contain yet, where they do
        contain all that was in its queue at `before`."""
        page = self._pages.get(replica)
        if page is None:
            return NO_WORK
        arriving = page.arriving
        while arriving and (arriving[0].routed_at or 0.0) + TRAVEL_S <= before:
            booking = arriving.popleft()
            if self._bookings.get(booking.call_id) is booking:
                booking.shown = True
                page.unseen = page.unseen.plus(booking.work, -1)
        return page.unseen

    def requests(self, replica: str) -> int:
        """Requests in work on `replica`."""
        return self.all(replica).requests

    def _enter(self, booking: _Booking) -> None:
        self._bookings[booking.call_id] = booking
        page = self._pages[booking.replica]
        page.all = page.all.plus(booking.work)
        page.unseen = page.unseen.plus(booking.work)
