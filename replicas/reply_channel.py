"""A replica's connections to the ingresses that it answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from replicas import wire
from replicas.protocol import ReplyAddress, TokenDelta

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
MAX_UNSENT_BYTES = 64 * 2**20
"""An ingress that lets more pile up is dropped: it must not eat the replica's memory."""


class IngressUnreachable(Exception):  # noqa: N818 - a condition, not a fault
    """A replica cannot answer an ingress. It travels there, to say which replica to avoid."""

    def __init__(self, replica: str, reason: str) -> None:
        super().__init__(replica, reason)  # pickle makes it anew of just these
        self.replica = replica
        self.reason = reason


class ReplyChannel:
    """One connection to one ingress. `on_abort(request_id, choice)` is called for what the
    ingress does not want any more, `on_lost(channel)` when the connection ends."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_abort: Callable[[str, int | None], None],
        on_lost: Callable[[ReplyChannel], None],
    ) -> None:
        self._writer = writer
        self._on_abort = on_abort
        self._on_lost = on_lost
        self._listening = asyncio.create_task(self._listen(reader))

    def send(self, deltas: Sequence[TokenDelta]) -> None:
        """Write one frame; never waits for the ingress."""
        if self._writer.is_closing():
            return
        self._writer.write(wire.deltas(deltas))
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            logger.warning("an ingress does not read its deltas: connection dropped")
            self._writer.transport.abort()

    def accept(self, request_id: str, placement: str | None) -> None:
        """Say that the request has come; `placement` is why it came here."""
        if not self._writer.is_closing():
            self._writer.write(wire.accepted(request_id, placement))

    def close(self) -> None:
        self._writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while (frame := await wire.read_frame(reader)) is not None:
                if frame[0] == wire.ABORT:
                    self._on_abort(frame[1], frame[2])
        except wire.FrameError as error:
            logger.warning("an ingress sent a bad frame: %s", error)
        finally:
            self._writer.close()
            self._on_lost(self)


class ReplyChannels:
    """Opens one connection an ingress, on the first request that comes from it."""

    def __init__(
        self,
        replica_id: str,
        on_abort: Callable[[str, int | None], None],
        on_lost: Callable[[ReplyChannel], None],
    ) -> None:
        self._replica_id = replica_id
        self._on_abort = on_abort
        self._on_lost = on_lost
        self._opening: dict[ReplyAddress, asyncio.Task[ReplyChannel]] = {}

    async def get(self, address: ReplyAddress) -> ReplyChannel:
        """The connection to `address`; raises IngressUnreachable where there is none."""
        opening = self._opening.get(address)
        if opening is None:
            opening = self._opening[address] = asyncio.create_task(self._open(address))
            opening.add_done_callback(lambda task: self._forget_failed(address, task))
        try:
            # Shielded: one cancelled request must not cancel the others' connection.
            return await asyncio.shield(opening)
        except OSError as error:  # TimeoutError is one
            raise IngressUnreachable(self._replica_id, repr(error)) from error

    def _forget_failed(self, address: ReplyAddress, task: asyncio.Task[ReplyChannel]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._opening.pop(address, None)

    async def _open(self, address: ReplyAddress) -> ReplyChannel:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(wire.hello(address.token, self._replica_id))

        def lost(channel: ReplyChannel) -> None:
            self._opening.pop(address, None)
            self._on_lost(channel)

        return ReplyChannel(reader, writer, self._on_abort, lost)
