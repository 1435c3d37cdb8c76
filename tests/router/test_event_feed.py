"""Routers that follow a replica's feed know what the replica knows, whatever breaks in between."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas import feed_wire, wire
from replicas.core.block_events import FindableBlocks
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
from router import event_feed
from router.event_feed import EventFeed

TIMEOUT_S = 10.0
ENGINE = EngineInfo("cpu", "float32", "float32", 16, 100, 1000, 50)
DIGESTS = [bytes([i]) * 16 for i in range(6)]
GREETING = feed_wire.greeting(FeedGreeting("replica", "first", "node", ENGINE))
SNAPSHOT = feed_wire.snapshot(FeedSnapshot(4, (), (), ReplicaSnapshot()))


class Router:
    """Keeps what one feed says, and what it was told of the feed itself."""

    def __init__(self, address: FeedAddress) -> None:
        self.blocks = FindableBlocks()
        self.load = ReplicaSnapshot()
        self.sequence = -1
        self.incarnations: list[str] = []
        self.snapshots = 0
        self.losses = 0
        self._news = asyncio.Event()
        self.feed = EventFeed("replica", address, self, clock=lambda: 1.0, jitter=lambda: 0.0)

    def greet(self, greeting: FeedGreeting, now: float) -> None:
        assert (greeting.replica_id, greeting.engine, now) == ("replica", ENGINE, 1.0)
        self.incarnations.append(greeting.incarnation)
        self._news.set()

    def reset(self, replica_id: str, snapshot: FeedSnapshot, now: float) -> None:
        assert replica_id == "replica"
        self.snapshots += 1
        self.sequence, self.load = snapshot.sequence, snapshot.load
        self.blocks.device, self.blocks.host = set(snapshot.device), set(snapshot.host)
        self._news.set()

    def apply(self, replica_id: str, step: FeedStep, now: float) -> bool:
        assert replica_id == "replica"
        if step.sequence > self.sequence + 1:
            return False
        self.sequence, self.load = step.sequence, step.load
        self.blocks.apply(step.events)
        self._news.set()
        return True

    def lose(self, replica_id: str, now: float) -> None:
        assert (replica_id, now) == ("replica", 1.0)
        self.losses += 1
        self._news.set()

    async def until(self, condition: Callable[[Router], bool]) -> None:
        while not condition(self):
            self._news.clear()
            await self._news.wait()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await scenario()

    asyncio.run(main())


@st.composite
def changes(draw: st.DrawFn) -> BlockEvents:
    device = draw(st.lists(st.sampled_from(DIGESTS), max_size=6, unique=True))
    host = draw(st.lists(st.sampled_from(DIGESTS), max_size=4, unique=True))
    cuts = sorted(draw(st.tuples(*[st.integers(0, len(device))] * 2)))
    middle = draw(st.integers(0, len(host)))
    return BlockEvents(
        stored=tuple(device[: cuts[0]]),
        restored=tuple(device[cuts[0] : cuts[1]]),
        removed=tuple(device[cuts[1] :]),
        offloaded=tuple(host[:middle]),
        dropped=tuple(host[middle:]),
        cleared=draw(st.sampled_from((False, False, False, True))),
    )


deeds = st.lists(changes() | st.sampled_from(("join", "break", "pause")), max_size=25)


@settings(max_examples=40)
@given(deeds)
def test_all_routers_know_what_can_be_found(script: Sequence[BlockEvents | str]) -> None:
    async def scenario() -> None:
        server = FeedServer("127.0.0.1", "replica", "node")
        address = await server.start(ENGINE)
        truth, routers = FindableBlocks(), [Router(address)]
        routers[0].feed.start()
        for number, deed in enumerate([*script, BlockEvents()]):
            match deed:
                case "join":
                    routers.append(Router(address))
                    routers[-1].feed.start()
                case "break":
                    for consumer in server._consumers:
                        consumer.close()
                case "pause":
                    await asyncio.sleep(0.003)
                case BlockEvents():
                    truth.apply(deed)
                    server.publish(deed, ReplicaSnapshot(preemptions=1 + number))
        for router in routers:
            await router.until(lambda r: r.load.preemptions == 1 + len(script))
            assert (router.blocks.device, router.blocks.host) == (truth.device, truth.host)
            assert len(set(router.incarnations)) == 1
            router.feed.stop()
        server.stop()

    run(scenario)


class Scripted:
    """A server that answers the n-th connection with the n-th script, and then hangs up or,
    after the last one, says nothing more."""

    def __init__(self, *scripts: bytes) -> None:
        self.scripts = scripts
        self.hellos: list[list[object] | None] = []

    async def start(self) -> FeedAddress:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return FeedAddress("127.0.0.1", server.sockets[0].getsockname()[1], "token")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.hellos)
        self.hellos.append(await wire.read_frame(reader))
        writer.write(self.scripts[min(number, len(self.scripts) - 1)])
        if number >= len(self.scripts) - 1:
            await reader.read()
        writer.close()


def step(sequence: int, *stored: bytes) -> bytes:
    return feed_wire.step(FeedStep(sequence, BlockEvents(stored=stored), ReplicaSnapshot()))


@pytest.mark.parametrize(
    "broken",
    [
        GREETING + SNAPSHOT + step(5) + step(7),
        GREETING + SNAPSHOT + step(5) + wire.pack(["step", 6]),
        GREETING + SNAPSHOT + SNAPSHOT,
        GREETING + SNAPSHOT + step(5)[:-3],
        GREETING + SNAPSHOT + wire.pack(["nonsense"]),
        GREETING + SNAPSHOT + b"\xff" * 8,
        GREETING + SNAPSHOT + b"\0\0\0\1\xc1",
        GREETING + step(5),
        GREETING,
    ],
    ids=[
        "gap",
        "damaged",
        "second snapshot",
        "cut off",
        "unknown",
        "too long",
        "not msgpack",
        "no snapshot",
        "greeting alone",
    ],
)
def test_what_breaks_a_feed_is_followed_by_a_new_snapshot(broken: bytes) -> None:
    async def scenario() -> None:
        whole = feed_wire.snapshot(FeedSnapshot(9, (DIGESTS[1],), (), ReplicaSnapshot()))
        server = Scripted(broken, GREETING + whole + step(10, DIGESTS[2]))
        router = Router(await server.start())
        router.feed.start()
        await router.until(lambda r: r.sequence == 10)
        assert router.losses == 1
        assert router.blocks.device == {DIGESTS[1], DIGESTS[2]}
        assert server.hellos == [["hello", "token", ""]] * 2
        router.feed.stop()

    run(scenario)


@pytest.mark.parametrize(
    "opening",
    [
        b"",
        SNAPSHOT,
        feed_wire.greeting(FeedGreeting("another", "first", "node", ENGINE)) + SNAPSHOT,
    ],
    ids=["nothing", "no greeting", "another replica"],
)
def test_who_does_not_greet_is_not_listened_to(opening: bytes) -> None:
    async def scenario() -> None:
        server = Scripted(opening, GREETING + SNAPSHOT)
        router = Router(await server.start())
        router.feed.start()
        await router.until(lambda r: r.snapshots == 1)
        assert (router.losses, router.incarnations) == (0, ["first"])
        router.feed.stop()

    run(scenario)


def test_silence_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "SILENCE_S", 0.05)

    async def scenario() -> None:
        server = Scripted(GREETING + SNAPSHOT)
        router = Router(await server.start())
        router.feed.start()
        await router.until(lambda r: r.losses >= 2)
        assert router.snapshots >= 2
        router.feed.stop()

    run(scenario)


def test_a_router_without_the_token_learns_nothing_and_tries_ever_more_rarely() -> None:
    pauses: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 9:
            enough.set()
            await asyncio.Event().wait()

    async def scenario() -> None:
        server = FeedServer("127.0.0.1", "replica", "node")
        address = await server.start(ENGINE)
        router = Router(dataclasses.replace(address, token="wrong"))
        router.feed._sleep = sleep
        router.feed.start()
        await enough.wait()
        assert (router.incarnations, router.losses) == ([], 0)
        assert pauses[:3] == [0.05, 0.1, 0.2]
        assert pauses == sorted(pauses)
        assert pauses[-1] == event_feed.MAX_BACKOFF_S / 2
        router.feed.stop()
        server.stop()

    run(scenario)


def test_a_feed_that_worked_is_tried_again_soon_however_often_it_had_failed_before() -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def scenario() -> None:
        works = GREETING + SNAPSHOT + step(5)
        server = Scripted(b"", b"", b"", works, b"", works)
        router = Router(await server.start())
        router.feed._sleep = sleep
        router.feed.start()
        await router.until(lambda r: r.snapshots == 2)
        assert pauses == [0.05, 0.1, 0.2, 0.05, 0.1]
        router.feed.stop()

    run(scenario)


def test_who_does_not_answer_a_connection_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "CONNECT_TIMEOUT_S", 0.05)
    connect, asked = asyncio.open_connection, 0

    async def unreachable_at_first(*where: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.Event().wait()
        return await connect(*where)

    async def scenario() -> None:
        server = Scripted(GREETING + SNAPSHOT)
        router = Router(await server.start())
        monkeypatch.setattr(asyncio, "open_connection", unreachable_at_first)
        router.feed.start()
        await router.until(lambda r: r.snapshots == 1)
        assert (asked, router.losses) == (2, 0)
        router.feed.stop()

    run(scenario)


def test_nobody_listening_is_no_end() -> None:
    async def scenario() -> None:
        router = Router(FeedAddress("127.0.0.1", 1, "token"))
        router.feed.start()
        await asyncio.sleep(0.02)
        assert (router.losses, router.snapshots) == (0, 0)
        assert router.feed._task is not None
        assert not router.feed._task.done()
        router.feed.stop()

    run(scenario)


def test_a_successor_is_another_incarnation() -> None:
    async def scenario() -> None:
        first, second = (FeedServer("127.0.0.1", "replica", "node") for _ in range(2))
        router = Router(await first.start(ENGINE))
        router.feed.start()
        await router.until(lambda r: r.snapshots == 1)
        first.stop()
        await router.until(lambda r: r.losses == 1)
        router.feed.stop()
        router.feed = EventFeed("replica", await second.start(ENGINE), router, clock=lambda: 1.0)
        router.feed.start()
        await router.until(lambda r: r.snapshots == 2)
        assert len(set(router.incarnations)) == 2
        router.feed.stop()
        second.stop()

    run(scenario)


def test_a_stopped_feed_ends_at_once_and_says_nothing_more() -> None:
    async def scenario() -> None:
        server = FeedServer("127.0.0.1", "replica", "node")
        router = Router(await server.start(ENGINE))
        router.feed.start()
        await router.until(lambda r: r.snapshots == 1)
        task = router.feed._task
        assert task is not None
        router.feed.stop()
        await asyncio.wait({task}, timeout=1.0)
        assert task.cancelled()
        assert router.losses == 0
        for _ in range(1000):
            await asyncio.sleep(0.002 if server.num_consumers else 0)
        assert server.num_consumers == 0
        server.stop()

    run(scenario)
