"""Attempts at one request side by side: the first one to deliver serves it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from cluster.openai.service import DeltaStream
from replicas.protocol import TokenDelta


class Attempt(Protocol):
    """One try at serving a request on one replica."""

    @property
    def replica(self) -> str | None:
        """Where the request is, once that is known."""

    @property
    def placement(self) -> str | None:
        """Why it is there (JSON), where the request asks for it."""

    def deltas(self) -> DeltaStream:
        """Deltas until every choice has ended; closing it early aborts those that run. It ends
        without any where no replica was better than the one that has the request.

        Raises ReplicaLost where another replica can go on, else another BackendError. What a
        replica refuses that had been served elsewhere is lost there, too.
        """

    def abort(self, choice: int) -> None:
        """End one choice; its last delta comes like any other."""


class Lane:
    """An attempt, and what it brings next."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self._stream = attempt.deltas()
        self._next: asyncio.Future[Sequence[TokenDelta]] | None = None

    async def close(self) -> None:
        """Abort what still runs."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait((self._next,))
        await self._stream.aclose()

    def pending(self) -> asyncio.Future[Sequence[TokenDelta]]:
        """What comes next."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._stream))
        return self._next

    async def take(self) -> Sequence[TokenDelta] | None:
        """What comes next: None at the end; raises what the attempt raises."""
        pending, self._next = self._next, None
        try:
            # Alone, a lane needs no task of its own for each step.
            return await (anext(self._stream) if pending is None else pending)
        except StopAsyncIteration:
            return None


async def first_of(lanes: Sequence[Lane]) -> Lane:
    """The first of the lanes on which something has come; the others wait for their turn."""
    pending = {lane.pending(): lane for lane in lanes}
    await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    return next(lane for future, lane in pending.items() if future.done())
