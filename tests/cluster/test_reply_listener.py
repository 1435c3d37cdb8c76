"""Replica and ingress over a real connection: deltas, aborts, losses, strangers."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest

from cluster.follower import ReplicaLost
from cluster.openai.service import BackendError
from cluster.reply_listener import ReplyListener
from replicas import reply_channel, wire
from replicas.protocol import ReplyAddress, TokenDelta
from replicas.reply_channel import IngressUnreachable, ReplyChannel, ReplyChannels

TIMEOUT_S = 5.0


class Replica:
    """The replica's side, with what it was told."""

    def __init__(self) -> None:
        self.aborts: asyncio.Queue[tuple[str, int | None]] = asyncio.Queue()
        self.lost: asyncio.Queue[ReplyChannel] = asyncio.Queue()
        self.channels = ReplyChannels(
            "replica-7",
            lambda request_id, choice: self.aborts.put_nowait((request_id, choice)),
            self.lost.put_nowait,
        )


def run(scenario: Callable[[ReplyListener, Replica], Awaitable[None]]) -> None:
    async def main() -> None:
        listener = ReplyListener("127.0.0.1")
        await listener.start()
        async with asyncio.timeout(TIMEOUT_S):
            await scenario(listener, Replica())
        await listener.stop()

    asyncio.run(main())


def delta(request_id: str, token: int, choice: int = 0) -> TokenDelta:
    return TokenDelta(request_id, choice, (token,))


def test_deltas_reach_their_request_in_order_and_together() -> None:
    async def scenario(listener: ReplyListener, replica: Replica) -> None:
        one, two = listener.open("one"), listener.open("two")
        channel = await replica.channels.get(listener.address)
        channel.send([delta("one", 1), delta("two", 2)])
        channel.send([delta("one", 3)])
        channel.send([delta("two", 4)])
        got: list[int] = []
        while len(got) < 2:
            got += [d.token_ids[0] for d in await two.take()]
        assert got == [2, 4]
        # By now all four have arrived, and what was not taken comes out at once.
        assert [d.token_ids[0] for d in await one.take()] == [1, 3]

    run(scenario)


def test_one_connection_serves_all_requests_of_an_ingress() -> None:
    async def scenario(listener: ReplyListener, replica: Replica) -> None:
        channels = await asyncio.gather(*(replica.channels.get(listener.address) for _ in range(5)))
        assert len(set(map(id, channels))) == 1

    run(scenario)


def test_a_request_that_is_cancelled_does_not_take_the_connection_from_others() -> None:
    async def scenario(listener: ReplyListener, replica: Replica) -> None:
        first = asyncio.create_task(replica.channels.get(listener.address))
        second = asyncio.create_task(replica.channels.get(listener.address))
        await asyncio.sleep(0)  # both wait for it
        first.cancel()
        assert await second is await replica.channels.get(listener.address)
        assert first.cancelled()

    run(scenario)


def test_an_ingress_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not eat the replica's memory; the replica is told that the ingress is lost."""
    monkeypatch.setattr(reply_channel, "MAX_UNSENT_BYTES", 2**20)
    long = TokenDelta("one", 0, tuple(range(200_000)))

    async def scenario(listener: ReplyListener, replica: Replica) -> None:
        async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(TIMEOUT_S)

        async with await asyncio.start_server(ignore, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            channel = await replica.channels.get(ReplyAddress("127.0.0.1", port, ""))
            for _ in range(40):  # 20 MiB: what the system takes in is less
                channel.send([long])
            assert await replica.lost.get() is channel

    run(scenario)


def test_who_accepts_a_request_is_known_before_its_first_delta() -> None:
    async def scenario(listener: ReplyListener, replica: Replica) -> None:
        inbox = listener.open("one")
        channel = await replica.channels.get(listener.address)
        channel.accept("one", "{}")
        await inbox.wait()
        assert (inbox.replica, inbox.placement) == ("replica-7", "{}")
        channel.close()
        with pytest.raises(ReplicaLost, match="connection") as lost:
            await inbox.take()
        assert lost.value.replica == "replica-7"

    run(scenario)


def test_the_first_failure_is_the_one_that_is_told() -> None:
    async def scenario(listener: ReplyListener, replica: Replica) -> None:
        inbox = listener.open("one")
        inbox.fail(ReplicaLost("died", "a"))
        inbox.fail(BackendError("and so did the call"))
        await inbox.wait()
        with pytest.raises(ReplicaLost, match="died"):
            await inbox.take()

    run(scenario)


def test_an_abort_reaches_the_replica() -> None:
    async def scenario(listener: ReplyListener, replica: Replica) -> None:
        inbox = listener.open("one")
        channel = await replica.channels.get(listener.address)
        channel.accept("one", None)
        await inbox.wait()
        listener.abort("one", 3)
        assert await replica.aborts.get() == ("one", 3)

    run(scenario)


def test_deltas_for_nobody_are_answered_with_an_abort() -> None:
    async def scenario(listener: ReplyListener, replica: Replica) -> None:
        listener.open("gone")
        listener.close("gone")
        channel = await replica.channels.get(listener.address)
        channel.send([delta("gone", 1)])
        assert await replica.aborts.get() == ("gone", None)

    run(scenario)


def test_a_lost_replica_fails_the_requests_it_served_and_no_others() -> None:
    async def scenario(listener: ReplyListener, replica: Replica) -> None:
        served, other = listener.open("served"), listener.open("other")
        channel = await replica.channels.get(listener.address)
        channel.send([delta("served", 1)])
        assert await served.take()
        channel.close()
        with pytest.raises(BackendError, match="connection"):
            await served.take()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await other.take()

    run(scenario)


def test_what_arrived_before_a_failure_is_not_lost() -> None:
    async def scenario(listener: ReplyListener, replica: Replica) -> None:
        inbox = listener.open("one")
        inbox.put(delta("one", 1))
        inbox.fail(BackendError("died"))
        assert [d.token_ids for d in await inbox.take()] == [(1,)]
        with pytest.raises(BackendError, match="died"):
            await inbox.take()

    run(scenario)


def test_the_replica_learns_that_an_ingress_went_and_can_connect_again() -> None:
    async def scenario(listener: ReplyListener, replica: Replica) -> None:
        stranger = dataclasses.replace(listener.address, token="wrong")
        refused = await replica.channels.get(stranger)
        assert await replica.lost.get() is refused
        again = await replica.channels.get(stranger)
        assert again is not refused

    run(scenario)


def test_a_stranger_gets_nothing_through() -> None:
    async def scenario(listener: ReplyListener, replica: Replica) -> None:
        inbox = listener.open("one")
        reader, writer = await asyncio.open_connection(listener.address.host, listener.address.port)
        writer.write(wire.hello("wrong") + wire.deltas([delta("one", 1)]))
        assert await reader.read() == b""  # closed
        writer.close()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await inbox.take()

    run(scenario)


def test_nobody_listening_is_an_error_that_the_next_call_may_not_have() -> None:
    async def scenario(listener: ReplyListener, replica: Replica) -> None:
        closed = ReplyAddress("127.0.0.1", 1, "token")
        for _ in range(2):
            with pytest.raises(IngressUnreachable, match="Refused") as unreachable:
                await replica.channels.get(closed)
            assert unreachable.value.replica == "replica-7"

    run(scenario)
