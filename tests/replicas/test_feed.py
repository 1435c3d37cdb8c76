"""A feed over real connections: who is let in, what they are told, and who is dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from replicas import feed, feed_wire, wire
from replicas.feed import FeedServer
from replicas.protocol import (
    BlockEvents,
    EngineInfo,
    FeedAddress,
    FeedGreeting,
    FeedSnapshot,
    FeedStep,
    ReplicaSnapshot,
)

TIMEOUT_S = 10.0
ENGINE = EngineInfo("cpu", "float32", "float32", 16, 100, 1000, 50)
NOTHING = BlockEvents()


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def stored(*numbers: int) -> BlockEvents:
    return BlockEvents(stored=tuple(map(digest, numbers)))


def load(marker: int) -> ReplicaSnapshot:
    """An idle replica's, that can be told from others."""
    return ReplicaSnapshot(preemptions=marker)


class Consumer:
    """A router's side, by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, address: FeedAddress, token: str | None = None) -> Consumer:
        consumer = cls(*await asyncio.open_connection(address.host, address.port))
        consumer.writer.write(wire.hello(address.token if token is None else token))
        return consumer

    async def next(self) -> FeedGreeting | FeedSnapshot | FeedStep:
        frame = await wire.read_frame(self.reader)
        assert frame is not None, "the connection ended"
        return feed_wire.unpack(frame)

    async def opening(self) -> tuple[FeedGreeting, FeedSnapshot]:
        greeting, snapshot = await self.next(), await self.next()
        assert isinstance(greeting, FeedGreeting)
        assert isinstance(snapshot, FeedSnapshot)
        return greeting, snapshot

    async def step(self) -> FeedStep:
        step = await self.next()
        assert isinstance(step, FeedStep)
        return step


def run(
    scenario: Callable[[FeedServer, FeedAddress], Awaitable[None]],
    max_unsent_bytes: int = feed.MAX_UNSENT_BYTES,
) -> None:
    async def main() -> None:
        server = FeedServer("127.0.0.1", "replica", "node", max_unsent_bytes)
        address = await server.start(ENGINE)
        async with asyncio.timeout(TIMEOUT_S):
            await scenario(server, address)
        server.stop()

    asyncio.run(main())


def test_a_snapshot_and_the_steps_after_it_leave_no_gap() -> None:
    async def scenario(server: FeedServer, address: FeedAddress) -> None:
        server.publish(stored(1, 2), load(1))
        server.publish(BlockEvents(removed=(digest(1),), offloaded=(digest(1),)), load(2))
        consumer = await Consumer.connect(address)
        greeting, snapshot = await consumer.opening()
        assert (greeting.replica_id, greeting.node_id) == ("replica", "node")
        assert greeting.engine == ENGINE
        assert snapshot == FeedSnapshot(2, (digest(2),), (digest(1),), load(2))
        server.publish(stored(3), load(3))
        server.publish(NOTHING, load(4))
        assert await consumer.step() == FeedStep(3, stored(3), load(3))
        assert await consumer.step() == FeedStep(4, NOTHING, load(4))

    run(scenario)


def test_each_consumer_joins_when_it_likes_and_gets_every_step_since() -> None:
    async def scenario(server: FeedServer, address: FeedAddress) -> None:
        early = await Consumer.connect(address)
        _, before = await early.opening()
        assert before.device == ()
        server.publish(stored(1), load(1))
        late = await Consumer.connect(address)
        _, after = await late.opening()
        assert (after.sequence, after.device) == (1, (digest(1),))
        server.publish(stored(2), load(2))
        assert (await early.step()).sequence == 1
        assert await early.step() == await late.step() == FeedStep(2, stored(2), load(2))

    run(scenario)


def test_every_server_is_an_incarnation_of_its_own() -> None:
    async def scenario(server: FeedServer, address: FeedAddress) -> None:
        other = FeedServer("127.0.0.1", "replica", "node")
        successor = await other.start(ENGINE)
        greetings = [(await (await Consumer.connect(a)).opening())[0] for a in (address, successor)]
        assert greetings[0].incarnation != greetings[1].incarnation
        assert address.token != successor.token
        other.stop()

    run(scenario)


@pytest.mark.parametrize(
    "words",
    [wire.hello("wrong"), wire.hello(""), wire.pack(["hello"]), b"\0\0\0\1\xc1", b"GET / HTTP/1.1"],
    ids=["wrong token", "no token", "half a hello", "not msgpack", "too long"],
)
def test_a_stranger_is_told_nothing(words: bytes) -> None:
    async def scenario(server: FeedServer, address: FeedAddress) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(words)
        assert await reader.read() == b""
        assert server.num_consumers == 0
        writer.close()

    run(scenario)


def test_who_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HELLO_TIMEOUT_S", 0.05)

    async def scenario(server: FeedServer, address: FeedAddress) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        assert await reader.read() == b""
        writer.close()

    run(scenario)


def test_a_consumer_has_nothing_to_say_after_its_hello() -> None:
    async def scenario(server: FeedServer, address: FeedAddress) -> None:
        consumer = await Consumer.connect(address)
        await consumer.opening()
        consumer.writer.write(b"x")
        assert await wire.read_frame(consumer.reader) is None
        assert server.num_consumers == 0

    run(scenario)


def test_who_does_not_read_is_dropped_and_holds_up_nobody() -> None:
    limit, events = 2**16, stored(*range(2**14))  # 256 KiB a step

    async def scenario(server: FeedServer, address: FeedAddress) -> None:
        slow, quick = await Consumer.connect(address), await Consumer.connect(address)
        await quick.opening()
        await slow.opening()
        slow.reader._transport.pause_reading()  # type: ignore[attr-defined]
        loop, longest, steps = asyncio.get_running_loop(), 0.0, 0
        while server.num_consumers > 1:
            before = loop.time()
            server.publish(events, load(steps))
            longest = max(longest, loop.time() - before)
            assert (await quick.step()).load == load(steps)
            steps += 1
            assert steps < 200, "50 MiB wait for somebody who does not read"
        assert longest < 1.0
        server.publish(NOTHING, load(-1))
        assert (await quick.step()).load == load(-1)

    run(scenario, limit)


def test_a_large_snapshot_alone_drops_nobody() -> None:
    async def scenario(server: FeedServer, address: FeedAddress) -> None:
        server.publish(stored(*range(160_000)), load(1))
        consumer = await Consumer.connect(address)
        assert isinstance(await consumer.next(), FeedGreeting)
        server.publish(NOTHING, load(2))
        assert server.num_consumers == 1
        snapshot = await consumer.next()
        assert isinstance(snapshot, FeedSnapshot)
        assert set(snapshot.device) == set(map(digest, range(160_000)))
        assert (await consumer.step()).load == load(2)

    run(scenario, max_unsent_bytes=2**12)


@pytest.mark.parametrize(
    "busy",
    [ReplicaSnapshot(running=1), ReplicaSnapshot(waiting=1), ReplicaSnapshot(copies=1)],
    ids=["running", "waiting", "copies"],
)
def test_the_load_is_told_while_a_step_takes_long(busy: ReplicaSnapshot) -> None:
    async def scenario(server: FeedServer, address: FeedAddress) -> None:
        server.publish(NOTHING, busy)
        consumer = await Consumer.connect(address)
        await consumer.opening()
        begin = asyncio.get_running_loop().time()
        for sequence in (2, 3, 4):
            assert await consumer.step() == FeedStep(sequence, NOTHING, busy)
        assert asyncio.get_running_loop().time() - begin < 10 * feed.BUSY_PERIOD_S

    run(scenario)


def test_an_idle_replica_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "IDLE_PERIOD_S", 0.3)

    async def scenario(server: FeedServer, address: FeedAddress) -> None:
        server.publish(NOTHING, load(1))
        consumer = await Consumer.connect(address)
        await consumer.opening()
        begin = asyncio.get_running_loop().time()
        assert await consumer.step() == FeedStep(2, NOTHING, load(1))
        assert asyncio.get_running_loop().time() - begin > 0.1

    run(scenario)


def test_the_end_of_a_server_ends_its_connections() -> None:
    async def scenario(server: FeedServer, address: FeedAddress) -> None:
        consumer = await Consumer.connect(address)
        await consumer.opening()
        server.stop()
        assert await wire.read_frame(consumer.reader) is None

    run(scenario)


def test_a_replica_that_is_not_well_has_no_consumers() -> None:
    """It would look like one without work."""
    well = [True]

    async def main() -> None:
        server = FeedServer("127.0.0.1", "replica", "node", is_well=lambda: well[0])
        address = await server.start(ENGINE)
        async with asyncio.timeout(TIMEOUT_S):
            consumer = await Consumer.connect(address)
            await consumer.opening()
            well[0] = False
            assert await wire.read_frame(consumer.reader) is None
            again = await Consumer.connect(address)
            assert await wire.read_frame(again.reader) is None
            assert server.num_consumers == 0
            server.publish(stored(1), load(1))
            well[0] = True
            recovered = await Consumer.connect(address)
            _, snapshot = await recovered.opening()
            assert snapshot == FeedSnapshot(1, (digest(1),), (), load(1))
        server.stop()

    asyncio.run(main())
