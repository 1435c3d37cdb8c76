"""The work this router has sent out and not seen the end of."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

UNROUTED_LIFETIME_S = 60.0
"""A booking that was never routed (its request was cancelled while it was placed) ends then."""


@dataclass(slots=True)
class _Booking:
    replica: str
    tokens: int
    booked_at: float
    routed: bool = False


class LoadBook:
    """Bookings by request: made when a replica is chosen, not when the call arrives there, so
    that requests placed at the same moment see each other."""

    def __init__(self) -> None:
        self._bookings: dict[str, _Booking] = {}
        self._requests: defaultdict[str, int] = defaultdict(int)
        self._tokens: defaultdict[str, int] = defaultdict(int)

    def book(self, request_id: str, replica: str, tokens: int, now: float) -> None:
        """Count `tokens` of work on `replica`; a second booking of a request moves it."""
        self.release(request_id)
        self._bookings[request_id] = _Booking(replica, tokens, now)
        self._requests[replica] += 1
        self._tokens[replica] += tokens

    def confirm(self, request_id: str) -> None:
        """The call has reached a replica: its end will be reported."""
        booking = self._bookings.get(request_id)
        if booking is not None:
            booking.routed = True

    def release(self, request_id: str) -> None:
        """The request has ended; unknown ones are fine."""
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            self._requests[booking.replica] -= 1
            self._tokens[booking.replica] -= booking.tokens

    def expire(self, now: float) -> None:
        """Release what was booked but never routed."""
        lost = [
            request_id
            for request_id, booking in self._bookings.items()
            if not booking.routed and now - booking.booked_at > UNROUTED_LIFETIME_S
        ]
        for request_id in lost:
            self.release(request_id)

    def drop(self, replica: str) -> None:
        """Release all bookings on a replica that has gone."""
        for request_id in [r for r, b in self._bookings.items() if b.replica == replica]:
            self.release(request_id)

    def requests(self, replica: str) -> int:
        """Requests in work on `replica`."""
        return self._requests[replica]

    def tokens(self, replica: str) -> int:
        """Tokens of work booked on `replica`."""
        return self._tokens[replica]
