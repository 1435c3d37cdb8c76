"""A replica with a real engine, its Serve and Ray played by hand: whose requests end when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from replicas import deployment, wire
from replicas.config import EngineConfig
from replicas.deployment import Replica, ReplicaSettings
from replicas.engine.engine import Engine
from replicas.feed_wire import METADATA_KEY
from replicas.protocol import Dispatch, FeedAddress, ReplyAddress
from tests.replicas.engine.driver import ask, make_engine
from tests.replicas.engine.tiny_models import Twin, random_prompt

TIMEOUT_S = 30.0
SETTINGS = ReplicaSettings("", None, "", "cpu", 1, "model", EngineConfig())
LONG = 600
"""Tokens that nobody waits for; three times as many fit."""


class Ingress:
    """Takes what replicas send; `frames` has everything but the hellos."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> Dispatch:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return Dispatch(ReplyAddress("127.0.0.1", port, "token"))

    async def until_it_generates(self) -> None:
        for _ in ("accepted", "first tokens"):
            await self.frames.get()

    def die(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        await wire.read_frame(reader)
        while (frame := await wire.read_frame(reader)) is not None:
            self.frames.put_nowait(frame)


@pytest.fixture
def run(
    llama: Twin, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Replica, Engine], Awaitable[None]]], None]:
    """Start a replica, do something with it and its engine, and stop it."""
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="replica"))
    monkeypatch.setattr(deployment.serve, "get_replica_context", lambda: context)
    node = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(deployment.ray, "get_runtime_context", lambda: node)
    monkeypatch.setattr(deployment.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    engines: list[Engine] = []

    def build(settings: ReplicaSettings) -> Engine:
        engines.append(make_engine(llama.paged))
        return engines[0]

    monkeypatch.setattr(deployment, "build_engine", build)

    def run(scenario: Callable[[Replica, Engine], Awaitable[None]]) -> None:
        async def main() -> None:
            replica = Replica.__new__(Replica)
            await Replica.__init__(replica, SETTINGS)  # type: ignore[misc]
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await scenario(replica, engines[0])
            finally:
                replica._feed.stop()
                await asyncio.to_thread(replica._engine.stop)

        asyncio.run(main())

    return run


Run = Callable[[Callable[[Replica, Engine], Awaitable[None]]], None]


async def until_it_runs(replica: Replica, choices: int) -> None:
    for _ in range(5000):
        if (await replica.report()).snapshot.running == choices:
            return
        await asyncio.sleep(0.002)
    pytest.fail("it never happens")


def test_an_ingress_that_dies_takes_its_requests_along_and_no_others(run: Run) -> None:
    async def scenario(replica: Replica, engine: Engine) -> None:
        dying, other = Ingress(), Ingress()
        to_dying, to_other = await dying.start(), await other.start()
        lost = [
            asyncio.create_task(replica.generate(ask(name, random_prompt(5), LONG), to_dying))
            for name in ("one", "two")
        ]
        kept = asyncio.create_task(replica.generate(ask("kept", random_prompt(5), LONG), to_other))
        await until_it_runs(replica, 3)
        dying.die()
        for each in lost:
            with pytest.raises(ConnectionError, match="ingress"):
                await each
        await until_it_runs(replica, 1)
        assert engine.live_request_ids() == ["kept"]
        assert replica._active.keys() == {"kept"}
        assert not kept.done()
        kept.cancel()
        await until_it_runs(replica, 0)
        other.die()

    run(scenario)


def test_a_call_that_is_cancelled_ends_its_request(run: Run) -> None:
    async def scenario(replica: Replica, engine: Engine) -> None:
        ingress = Ingress()
        to_ingress = await ingress.start()
        call = asyncio.create_task(
            replica.generate(ask("one", random_prompt(5), LONG, n=2), to_ingress)
        )
        await ingress.until_it_generates()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until_it_runs(replica, 0)
        assert (list(engine.live_request_ids()), replica._active) == ([], {})
        assert await replica.generate(ask("two", random_prompt(5), 3, n=2), to_ingress)
        ingress.die()

    run(scenario)


def test_a_call_that_no_replica_is_good_enough_for_is_ended_unseen(run: Run) -> None:
    async def scenario(replica: Replica, engine: Engine) -> None:
        nowhere = ReplyAddress("127.0.0.1", 1, "token")
        assert not await replica.generate(ask("one", [1]), Dispatch(nowhere, declined=True))

    run(scenario)


def test_a_replica_whose_engine_failed_ends_its_requests_and_its_feed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    async def scenario(replica: Replica, engine: Engine) -> None:
        address = FeedAddress(**(await replica.record_replica_metadata())[METADATA_KEY])
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(wire.hello(address.token))
        assert await wire.read_frame(reader) is not None
        await replica.check_health()
        ingress = Ingress()
        monkeypatch.setattr(engine, "step", fail)
        assert await replica.generate(ask("one", [1, 2, 3]), await ingress.start())
        while await wire.read_frame(reader) is not None:
            pass
        with pytest.raises(RuntimeError, match="out of memory"):
            await replica.check_health()
        assert "out of memory" in ((await replica.report()).failure or "")
        writer.close()
        ingress.die()

    run(scenario)
