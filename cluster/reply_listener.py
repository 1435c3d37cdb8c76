"""Where replicas send the deltas of this ingress' requests."""

from __future__ import annotations

import asyncio
import logging
import secrets

from cluster.follower import ReplicaLost
from cluster.openai.service import BackendError
from replicas import wire
from replicas.protocol import ReplyAddress, TokenDelta

logger = logging.getLogger(__name__)


class Inbox:
    """The deltas of one request that nobody has taken yet.

    What piles up while the reader is busy comes out together, so that a slow moment makes
    fewer, larger chunks instead of a backlog of small ones.
    """

    def __init__(self) -> None:
        self.replica: str | None = None
        """Who serves the request, once it has accepted it."""
        self.placement: str | None = None
        """Why it came there, where the request asked for it."""
        self.declined = False
        """No replica was as good as the one that has the request already."""
        self._deltas: list[TokenDelta] = []
        self._failure: BackendError | None = None
        self._accepted = asyncio.Event()
        self._arrived = asyncio.Event()

    def accept(self, replica: str, placement: str | None) -> None:
        """A replica has taken the request."""
        self.replica, self.placement = replica, placement
        self._accepted.set()

    def decline(self) -> None:
        """No replica takes the request."""
        self.declined = True
        self._accepted.set()

    async def wait(self) -> None:
        """Until it is known who takes the request, or it failed."""
        await self._accepted.wait()

    def put(self, delta: TokenDelta) -> None:
        self._deltas.append(delta)
        self._arrived.set()

    def fail(self, failure: BackendError) -> None:
        """Let `take` raise `failure` once all that arrived has been taken."""
        self._failure = self._failure or failure  # the first one knows best
        self._arrived.set()
        self._accepted.set()

    async def take(self) -> list[TokenDelta]:
        """All deltas that have arrived; waits for the first."""
        await self._arrived.wait()
        if not self._deltas:
            assert self._failure is not None
            raise self._failure
        taken, self._deltas = self._deltas, []
        if self._failure is None:
            self._arrived.clear()
        return taken


class ReplyListener:
    """A TCP server that sorts replicas' frames into the requests' inboxes.

    Deltas of a request that nobody waits for are answered with an abort: whatever happened
    to its cancellation on the way, a replica cannot go on generating for nobody.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._token = secrets.token_hex(16)
        self._inboxes: dict[str, Inbox] = {}
        self._sources: dict[str, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self._address: ReplyAddress | None = None

    @property
    def address(self) -> ReplyAddress:
        """What replicas connect to; raises RuntimeError before `start`."""
        if self._address is None:
            raise RuntimeError("the listener has not been started")
        return self._address

    async def start(self) -> None:
        """Listen on a free port of the host."""
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        port = self._server.sockets[0].getsockname()[1]
        self._address = ReplyAddress(self._host, port, self._token)

    def open(self, request_id: str) -> Inbox:
        """Receive the deltas of a request from now on."""
        inbox = self._inboxes[request_id] = Inbox()
        return inbox

    def close(self, request_id: str) -> None:
        """Receive no more deltas of a request."""
        self._inboxes.pop(request_id, None)
        self._sources.pop(request_id, None)

    def abort(self, request_id: str, choice: int | None) -> None:
        """Tell the replica that serves the request to end it, or one of its choices."""
        source = self._sources.get(request_id)
        if source is not None and not source.is_closing():
            source.write(wire.abort(request_id, choice))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replica = None
        try:
            replica = await wire.admit(reader, self._token)
            if replica is None:
                logger.warning("dropped a connection that did not show this ingress' token")
                return
            while (frame := await wire.read_frame(reader)) is not None:
                if frame[0] == wire.DELTAS:
                    self._sort(wire.unpack_deltas(frame[1]), writer)
                elif frame[0] == wire.ACCEPTED:
                    self._accept(replica, frame[1], frame[2], writer)
        except (wire.FrameError, TimeoutError) as error:
            logger.warning("dropped a connection: %r", error)
        finally:
            writer.close()
            self._fail_requests_of(writer)

    def _accept(
        self, replica: str, request_id: str, placement: str | None, writer: asyncio.StreamWriter
    ) -> None:
        inbox = self._inboxes.get(request_id)
        if inbox is not None:  # else its cancellation is on its way
            self._sources[request_id] = writer
            inbox.accept(replica, placement)

    def _sort(self, deltas: list[TokenDelta], writer: asyncio.StreamWriter) -> None:
        orphans = set()
        for delta in deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is not None:
                self._sources[delta.request_id] = writer
                inbox.put(delta)
            elif delta.finish_reason is None:
                orphans.add(delta.request_id)
        for request_id in orphans:
            writer.write(wire.abort(request_id, None))

    def _fail_requests_of(self, writer: asyncio.StreamWriter) -> None:
        for request_id, source in list(self._sources.items()):
            if source is writer:
                inbox = self._inboxes[request_id]
                inbox.fail(ReplicaLost("the replica's connection ended", inbox.replica))
