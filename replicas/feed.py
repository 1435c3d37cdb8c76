"""Publishes what can be found on a replica, and its load, to every router that connects."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from replicas import feed_wire, wire
from replicas.core.block_events import FindableBlocks
from replicas.protocol import (
    BlockEvents,
    EngineInfo,
    FeedAddress,
    FeedGreeting,
    FeedSnapshot,
    FeedStep,
    ReplicaSnapshot,
)

logger = logging.getLogger(__name__)

BUSY_PERIOD_S = 0.05
"""While there is work, the load is told again when no step was for so long."""
IDLE_PERIOD_S = 1.0
"""The same without work, so that silence means that something is wrong."""
MAX_UNSENT_BYTES = 4 * 2**20
"""Of steps. A router that lets more pile up is dropped: it must not eat the replica's memory, and
a new snapshot is smaller than what it has missed."""

_NOTHING = BlockEvents()


class _Consumer:
    """One router's connection."""

    def __init__(self, writer: asyncio.StreamWriter, max_unsent_bytes: int) -> None:
        self._writer = writer
        self._max_unsent_bytes = max_unsent_bytes

    def send(self, frame: bytes) -> bool:
        """Write without waiting; False, and the connection is gone, where too much is unsent."""
        transport = self._writer.transport
        if transport.is_closing():
            return False
        self._writer.write(frame)
        if transport.get_write_buffer_size() <= self._max_unsent_bytes:
            return True
        logger.warning("a router does not read this replica's feed: connection dropped")
        transport.abort()
        return False

    def close(self) -> None:
        self._writer.transport.abort()


class FeedServer:
    """A TCP server on an event loop, where all its methods are called.

    It keeps a copy of what can be found, so that the engine is not asked when somebody connects,
    and writes to each consumer without waiting for it. Who falls behind, or misses a step,
    connects again and gets a new snapshot. A replica that is not well has no consumers: to a
    router it must not look like one without work.
    """

    def __init__(
        self,
        host: str,
        replica_id: str,
        node_id: str,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
        is_well: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_well`: whether the replica makes progress; asked several times a second."""
        self._host = host
        self._replica_id = replica_id
        self._node_id = node_id
        self._max_unsent_bytes = max_unsent_bytes
        self._is_well = is_well
        self._token = secrets.token_hex(16)
        self._incarnation = secrets.token_hex(8)
        self._blocks = FindableBlocks()
        self._load = ReplicaSnapshot()
        self._sequence = 0
        self._published_at = 0.0
        self._consumers: set[_Consumer] = set()
        self._server: asyncio.Server | None = None
        self._pulse: asyncio.Task[None] | None = None

    @property
    def num_consumers(self) -> int:
        """Routers that are connected."""
        return len(self._consumers)

    async def start(self, engine: EngineInfo) -> FeedAddress:
        """Listen on a free port of the host. What was published before is in the snapshots."""
        self._greeting = feed_wire.greeting(
            FeedGreeting(self._replica_id, self._incarnation, self._node_id, engine)
        )
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        self._pulse = asyncio.create_task(self._beat())
        port = self._server.sockets[0].getsockname()[1]
        return FeedAddress(self._host, port, self._token)

    def publish(self, events: BlockEvents, load: ReplicaSnapshot) -> None:
        """Tell everybody what a step changed; never waits."""
        self._blocks.apply(events)
        self._load = load
        self._sequence += 1
        self._published_at = asyncio.get_running_loop().time()
        if self._consumers:
            frame = feed_wire.step(FeedStep(self._sequence, events, load))
            self._consumers = {each for each in self._consumers if each.send(frame)}

    def stop(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        if self._pulse is not None:
            self._pulse.cancel()
        self._drop_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        consumer = None
        try:
            if await wire.admit(reader, self._token) is None:
                logger.warning("dropped a connection that did not show this feed's token")
                return
            if not self._is_well():
                return
            consumer = self._join(writer)
            await reader.read(1)  # nothing more is to come: whatever does ends the connection
        except (wire.FrameError, ConnectionError) as error:
            logger.warning("dropped a connection to the feed: %r", error)
        finally:
            if consumer is not None:
                self._consumers.discard(consumer)
            writer.close()

    def _join(self, writer: asyncio.StreamWriter) -> _Consumer:
        """Between two steps: the snapshot and the steps after it leave no gap."""
        blocks = self._blocks
        snapshot = feed_wire.snapshot(
            FeedSnapshot(self._sequence, tuple(blocks.device), tuple(blocks.host), self._load)
        )
        opening = self._greeting + snapshot
        consumer = _Consumer(writer, len(opening) + self._max_unsent_bytes)
        if consumer.send(opening):
            self._consumers.add(consumer)
        return consumer

    async def _beat(self) -> None:
        """Tell the load while no step does; tell nothing any more while the replica is unwell."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(BUSY_PERIOD_S)
            if self._consumers and not self._is_well():
                logger.warning("the replica is unwell: its feed is closed to all routers")
                self._drop_all()
            load = self._load
            busy = load.running or load.waiting or load.copies
            period = BUSY_PERIOD_S if busy else IDLE_PERIOD_S
            if self._consumers and loop.time() - self._published_at >= period:
                self.publish(_NOTHING, load)

    def _drop_all(self) -> None:
        for consumer in self._consumers:
            consumer.close()
        self._consumers.clear()
