"""Follows the feed of one replica, for as long as there is one."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from replicas import feed_wire, wire
from replicas.protocol import FeedAddress, FeedGreeting, FeedSnapshot, FeedStep

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 5.0
"""A replica says something each second, even if there is nothing to say."""
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0

_FAILURES = (wire.FrameError, OSError, TimeoutError)

T = TypeVar("T", FeedGreeting, FeedSnapshot, FeedStep)


class States(Protocol):
    """Who takes in what feeds say: see `router.replica_states`."""

    def greet(self, greeting: FeedGreeting, now: float) -> None: ...

    def reset(self, replica_id: str, snapshot: FeedSnapshot, now: float) -> None: ...

    def apply(self, replica_id: str, step: FeedStep, now: float) -> bool: ...

    def lose(self, replica_id: str, now: float) -> None: ...


class EventFeed:
    """Connects, takes a snapshot and then every step; after a gap, a bad frame or a lost
    connection it begins again.

    `start` and `stop` are called on the event loop that the states belong to.
    """

    def __init__(
        self,
        replica_id: str,
        address: FeedAddress,
        states: States,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`jitter` gives numbers in [0, 1), so that not all come back at the same moment."""
        self._replica_id = replica_id
        self._address = address
        self._states = states
        self._clock = clock
        self._jitter = jitter
        self._sleep = sleep
        self._failures = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow."""
        self._task = asyncio.create_task(self._run(), name=f"feed of {self._replica_id}")
        self._task.add_done_callback(_note_end)

    def stop(self) -> None:
        """Follow no more; what is known stays, for the owner of the states to forget."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except _FAILURES as error:
                if not self._failures:
                    logger.warning("lost the feed of %s: %r", self._replica_id, error)
            await self._sleep(self._backoff_s())

    def _backoff_s(self) -> float:
        longest = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return longest * (0.5 + 0.5 * self._jitter())

    async def _follow(self) -> None:
        """One connection, until it fails."""
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        try:
            writer.write(wire.hello(self._address.token))
            greeting = await _next(reader, FeedGreeting)
            if greeting.replica_id != self._replica_id:
                raise wire.FrameError(f"{greeting.replica_id} answers")
            await self._take_in(reader, greeting)
        finally:
            writer.close()

    async def _take_in(self, reader: asyncio.StreamReader, greeting: FeedGreeting) -> None:
        states, replica_id, clock = self._states, self._replica_id, self._clock
        states.greet(greeting, clock())
        try:
            states.reset(replica_id, await _next(reader, FeedSnapshot), clock())
            while states.apply(replica_id, await _next(reader, FeedStep), clock()):
                self._failures = 0
            raise wire.FrameError("a step is missing")
        except _FAILURES:
            # Not when stopped: the replica may have been forgotten by then.
            states.lose(replica_id, clock())
            raise


def _note_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s broke", task.get_name(), exc_info=error)


async def _next(reader: asyncio.StreamReader, kind: type[T]) -> T:
    async with asyncio.timeout(SILENCE_S):
        frame = await wire.read_frame(reader)
    if frame is None:
        raise ConnectionError("the connection ended")
    value = feed_wire.unpack(frame)
    if not isinstance(value, kind):
        raise wire.FrameError(f"a {type(value).__name__} where a {kind.__name__} is due")
    return value
