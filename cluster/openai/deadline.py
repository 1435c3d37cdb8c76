"""How long a request may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cluster.openai.service import DeadlinePassed


class Deadline:
    """When one request must be complete: so many seconds after its arrival, however it spends
    them."""

    def __init__(self, arrived_at: float, limit_s: float | None, note: Callable[[], None]) -> None:
        """
        Args:
            arrived_at: seconds of the event loop's clock.
            limit_s: what the operator allows; None allows any time.
            note: told when the deadline has ended the request.
        """
        self._arrived_at = arrived_at
        self._limit_s = limit_s
        self._note = note
        self._asked = False
        self._timeout: asyncio.Timeout | None = None

    def tighten(self, timeout_s: float | None) -> None:
        """What the client allows counts where it is less."""
        if timeout_s is not None and (self._limit_s is None or timeout_s < self._limit_s):
            self._limit_s, self._asked = timeout_s, True

    def lift(self) -> None:
        """Lets what is under way take any time."""
        if self._timeout is not None:
            self._timeout.reschedule(None)

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancels what is done within when the time is over.

        Raises:
            DeadlinePassed: instead of that cancellation, once all within has cleaned up. Any
                other cancellation stays one.
        """
        ends_at = None if self._limit_s is None else self._arrived_at + self._limit_s
        # Nothing is begun for a request that is late already.
        if ends_at is not None and ends_at <= asyncio.get_running_loop().time():
            raise self._passed()
        try:
            async with asyncio.timeout_at(ends_at) as timeout:
                self._timeout = timeout
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self._passed() from None

    def _passed(self) -> DeadlinePassed:
        assert self._limit_s is not None
        self._note()
        return DeadlinePassed(self._limit_s, asked=self._asked)
