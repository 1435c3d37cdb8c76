"""The HTTP layer's backend: requests that outlive the replicas which serve them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from cluster.follower import Dispatcher, Follower, FollowLimits
from cluster.openai.service import QueueFull
from replicas.protocol import GenerateRequest, TokenDelta


@dataclass(slots=True)
class Hops:
    """Requests that went on elsewhere, since the start."""

    failovers: int = 0
    moves: int = 0


class FailoverBackend:
    """Follows each request from replica to replica until it is complete.

    A replica that is lost takes no token with it: the next one gets the prompt and the output
    ids apart, computes their KV (or finds it), and draws on.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        limits: FollowLimits,
        max_requests: int,
        note: Callable[[GenerateRequest, int, float], None] = lambda *_: None,
    ) -> None:
        """`note(request, output tokens, arrival)` is told of each request that has ended; the
        arrival is in seconds of the event loop's clock."""
        self.hops = Hops()
        self._dispatcher = dispatcher
        self._limits = limits
        self._max_requests = max_requests
        self._note = note
        self._open: dict[str, Follower] = {}

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Sequence[TokenDelta], None]:
        """Deltas of all choices as they come; closing the iterator aborts what still runs.

        Raises:
            QueueFull: as many requests as allowed are in work already.
            BackendError: the request failed, or as many replicas as allowed did.
        """
        if len(self._open) >= self._max_requests:
            raise QueueFull(f"{self._max_requests} requests are in work already")
        arrived_at = asyncio.get_running_loop().time()
        follower = Follower(request, self._dispatcher, self._limits)
        self._open[request.request_id] = follower
        try:
            while not follower.finished:
                if deltas := await follower.step():
                    yield deltas
        finally:
            del self._open[request.request_id]
            self.hops.failovers += follower.failovers
            self.hops.moves += follower.moves
            self._note(request, follower.output_tokens, arrived_at)
            await follower.close()

    def abort(self, request_id: str, choice: int) -> None:
        """End one choice; its last delta still follows, from a replica or from here."""
        if request_id in self._open:
            self._open[request_id].abort(choice)
