"""The work this router has sent out and not seen the end of."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
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
    in_doubt: bool = False
    """Whether an end of the call was told before the call was accepted: that of an earlier try,
    which the replica refused, or its own."""


@dataclass(slots=True)
class _Page:
    """The bookings on one replica."""

    all: Work = NO_WORK
    unseen: Work = NO_WORK
    arriving: OrderedDict[str, _Booking] = field(default_factory=OrderedDict)
    """Routed and not shown yet, by call, in the order of routing."""


class LoadBook:
    """Bookings by call: made when a replica is chosen, not when the call arrives there, so that
    requests placed at the same moment see each other.

    A booking stands in for its request until the replica's own figures contain it (`unseen`), so
    that no request is left out. As nobody can know in which of two successive reports a request
    appears first, it may be counted twice in the one between; never for longer.
    """

    def __init__(self) -> None:
        self._bookings: dict[str, _Booking] = {}
        self._unrouted: OrderedDict[str, _Booking] = OrderedDict()
        """Not accepted yet, or in doubt: by call, in the order of booking."""
        self._pages: defaultdict[str, _Page] = defaultdict(_Page)

    def __len__(self) -> int:
        return len(self._bookings)

    def __contains__(self, call_id: str) -> bool:
        """Whether the call is booked, or was and may come back."""
        return call_id in self._bookings or call_id in self._unrouted

    def book(self, call_id: str, replica: str, work: Work, now: float) -> None:
        """Count `work` on `replica`; a second booking of a call moves it."""
        self.release(call_id)
        booking = self._unrouted[call_id] = _Booking(call_id, replica, work, now)
        self._enter(booking)

    def routed(self, call_id: str, replica: str, now: float) -> None:
        """`replica` has accepted the call: its end will be reported. Moves the booking there.

        One in doubt counts again, but not for ever: the end that was told may have been its own.
        """
        booking = self._unrouted.get(call_id)
        if booking is None or booking.routed_at is not None:
            return
        if not booking.in_doubt:
            self._leave(booking)
            del self._unrouted[call_id]
        booking.replica, booking.routed_at = replica, now
        self._enter(booking)
        self._pages[replica].arriving[call_id] = booking

    def release(self, call_id: str, replica: str | None = None) -> bool:
        """The request has ended, at `replica` where that is told. Unknown ones are fine.

        False where that is not certain: of a call that a replica refused, Serve tells the end
        there as well, when the call may be booked elsewhere, or there once more. The latter
        counts no more until it is accepted.
        """
        if replica is None:
            self._unrouted.pop(call_id, None)
        booking = self._bookings.get(call_id)
        if booking is None:
            return call_id not in self._unrouted
        if replica not in (None, booking.replica):
            return False
        self._leave(booking)
        if replica is not None and booking.routed_at is None:
            booking.in_doubt = True
            return False
        self._unrouted.pop(call_id, None)
        return True

    def expire(self, now: float) -> None:
        """Release what was booked but never routed, and what is in doubt."""
        unrouted = self._unrouted
        while unrouted:
            call_id, booking = next(iter(unrouted.items()))
            if now - booking.booked_at <= UNROUTED_LIFETIME_S:
                break
            self.release(call_id)

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
        while arriving:
            booking = next(iter(arriving.values()))
            if (booking.routed_at or 0.0) + TRAVEL_S > before:
                break
            del arriving[booking.call_id]
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

    def _leave(self, booking: _Booking) -> None:
        del self._bookings[booking.call_id]
        page = self._pages[booking.replica]
        page.all = page.all.plus(booking.work, -1)
        if not booking.shown:
            page.unseen = page.unseen.plus(booking.work, -1)
            page.arriving.pop(booking.call_id, None)
