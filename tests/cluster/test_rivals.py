"""A preempted request asks who would be quicker; who delivers first serves it from then on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.failover import FailoverBackend
from cluster.follower import Conditions, ReplicaLost
from cluster.openai.service import BackendError, QueueFull
from replicas.protocol import ChoiceProgress, FinishReason, GenerateRequest, TokenDelta
from tests.cluster.played_replicas import (
    LIMITS,
    Declining,
    Dying,
    Failing,
    Scripted,
    Try,
    Waiting,
    collect,
    outputs,
    request,
    run,
    token,
)

ALL = [0, 1, 2, 3, 4]
Maker = Callable[[GenerateRequest], Try]


def test_a_request_that_waits_for_kv_goes_on_where_it_need_not() -> None:
    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Waiting(data, 2, "full", wait_s=8.0),
            lambda data: Try(data, None, "free", accepts_after_s=0.5),
        )
        backend = FailoverBackend(replicas, LIMITS, 8)
        deltas = await collect(backend, request())
        assert outputs(deltas, 0) == ALL
        assert all(delta.wait_s is None for delta in deltas)
        assert replicas.conditions[1] == Conditions(frozenset({"full"}), within_s=4.0)
        assert replicas.sent[1].progress == (ChoiceProgress((0, 1)),)
        receipt = deltas[-1].receipt
        assert receipt is not None
        assert (receipt.moves, receipt.failovers, receipt.preemptions) == (1, 0, 2)
        assert receipt.stall_s == 0.5
        assert backend.hops.moves == 1
        assert all(each.closed for each in replicas.tries)

    run(scenario)


def test_who_delivers_first_serves_the_request() -> None:
    """The other one is ended at once: it would draw the same tokens again."""

    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Waiting(data, 2, "full", wait_s=8.0),
            lambda data: Waiting(data, 0, "slow", wait_s=9.0),  # it has to wait as well
        )
        backend = FailoverBackend(replicas, LIMITS, 8)
        replicas.go_on_after(0.5, 0)
        got: list[TokenDelta] = []
        async with aclosing(backend.generate(request())) as stream:
            async for deltas in stream:
                got += deltas
                if len(outputs(got, 0)) == 3:
                    assert [each.closed for each in replicas.tries] == [False, True]
        assert outputs(got, 0) == ALL
        assert got[-1].receipt is not None
        assert got[-1].receipt.moves == 0

    run(scenario)


@pytest.mark.parametrize(
    "rival",
    [
        lambda data: Declining(data, None, "nobody"),
        lambda data: Failing(data, QueueFull("no room")),
        lambda data: Failing(data, BackendError("it broke")),
        lambda data: Failing(data, ReplicaLost("it died", "dead")),
        lambda data: Failing(data, ReplicaLost("it died")),
        lambda data: Try(data, 0, "dead"),
    ],
    ids=["declined", "queue full", "failed", "lost", "lost unseen", "lost accepted"],
)
def test_a_rival_that_comes_to_nothing_costs_nothing(rival: Maker) -> None:
    async def scenario() -> None:
        replicas = Scripted(lambda data: Waiting(data, 2, "full", wait_s=8.0), rival)
        backend = FailoverBackend(replicas, replace(LIMITS, max_failovers=0), 8)
        replicas.go_on_after(0.5, 0)
        deltas = await collect(backend, request())
        assert outputs(deltas, 0) == ALL
        assert (backend.hops.moves, backend.hops.failovers) == (0, 0)
        assert len(replicas.tries) == 2
        assert all(each.closed for each in replicas.tries)

    run(scenario)


def test_no_rival_is_looked_for_where_the_request_was_or_is() -> None:
    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Try(data, 1, "lost"),
            lambda data: Waiting(data, 1, "full", wait_s=8.0),
            lambda data: Failing(data, ReplicaLost("it died", "lost too")),
            lambda data: Try(data, None, "free"),
        )
        deltas = await collect(FailoverBackend(replicas, LIMITS, 8), request())
        assert outputs(deltas, 0) == ALL
        assert [each.avoid for each in replicas.conditions] == [
            set(),
            {"lost"},
            {"lost", "full"},
            {"lost", "full", "lost too"},
        ]

    run(scenario)


def test_it_asks_less_and_less_often_while_nobody_would_be_quicker() -> None:
    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Waiting(data, 2, "full", wait_s=80.0),
            lambda data: Declining(data, None, "nobody"),
        )
        replicas.go_on_after(30.0, 0)
        deltas = await collect(FailoverBackend(replicas, LIMITS, 8), request())
        assert outputs(deltas, 0) == ALL
        assert replicas.began_at == [0, 0, 1, 3, 7, 15, 23]

    run(scenario)


def test_it_asks_at_once_when_it_is_preempted_again() -> None:
    class Twice(Waiting):
        async def _play(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
            async with aclosing(super()._play()) as stream:
                async for deltas in stream:
                    yield deltas
                    if outputs(deltas, 0) == [3]:
                        self.go_on.clear()
                        async for waits in self._wait():
                            yield waits

    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Twice(data, 2, "full", wait_s=80.0),
            lambda data: Declining(data, None, "nobody"),
        )
        replicas.go_on_after(3.5, 0)
        replicas.go_on_after(5.0, 0)
        deltas = await collect(FailoverBackend(replicas, LIMITS, 8), request())
        assert outputs(deltas, 0) == ALL
        assert replicas.began_at == [0, 0, 1, 3, 3.5, 4.5]

    run(scenario)


def test_a_rival_takes_over_from_a_replica_that_dies_in_the_meantime() -> None:
    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Dying(data, 2, "full", wait_s=8.0),
            lambda data: Waiting(data, 0, "other", wait_s=1.0),
        )
        backend = FailoverBackend(replicas, LIMITS, 8)
        replicas.go_on_after(0.5, 0)
        replicas.go_on_after(1.0, 1)
        deltas = await collect(backend, request())
        assert outputs(deltas, 0) == ALL
        assert (backend.hops.failovers, backend.hops.moves) == (1, 0)
        assert len(replicas.tries) == 2

    run(scenario)


@pytest.mark.parametrize(
    "rival",
    [
        lambda data: Declining(data, None, "nobody", accepts_after_s=0.9),
        lambda data: Try(data, None, "late", accepts_after_s=60.0),
    ],
    ids=["declined later", "not accepted yet"],
)
def test_a_rival_that_nobody_has_accepted_does_not_take_over(rival: Maker) -> None:
    """It may be declined, and would wait without bound: the request is sent anew, to stay."""

    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Dying(data, 2, "full", wait_s=8.0),
            rival,
            lambda data: Try(data, None, "healthy"),
        )
        backend = FailoverBackend(replicas, LIMITS, 8)
        replicas.go_on_after(0.5, 0)
        deltas = await collect(backend, request())
        assert outputs(deltas, 0) == ALL
        assert replicas.conditions[2] == Conditions(frozenset({"full"}), patience_s=5.0)
        assert (backend.hops.failovers, backend.hops.moves) == (1, 0)
        assert all(each.closed for each in replicas.tries)
        assert asyncio.get_running_loop().time() < 0.9

    run(scenario)


def test_a_request_out_of_retries_goes_on_where_a_rival_has_it() -> None:
    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Dying(data, 2, "full", wait_s=8.0),
            lambda data: Waiting(data, 0, "other", wait_s=1.0),
        )
        backend = FailoverBackend(replicas, replace(LIMITS, max_failovers=0), 8)
        replicas.go_on_after(0.5, 0)
        replicas.go_on_after(1.0, 1)
        assert outputs(await collect(backend, request()), 0) == ALL
        assert backend.hops.failovers == 1

    run(scenario)


def test_rivals_do_not_let_a_request_be_lost_without_bound() -> None:
    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Dying(data, 2, "full", wait_s=8.0),
            lambda data: Dying(data, 0, "other", wait_s=8.0),
        )
        limits = replace(LIMITS, max_failovers=0, max_moves=9)
        for number in range(2):
            replicas.go_on_after(2.5 + number, number)
        with pytest.raises(BackendError, match="2 replicas failed this request"):
            await collect(FailoverBackend(replicas, limits, 8), request())
        assert len(replicas.tries) == 2

    run(scenario)


def test_moves_are_bounded() -> None:
    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Waiting(data, 2, "full", wait_s=8.0),
            lambda data: Waiting(data, 1, "full too", wait_s=8.0),
        )
        backend = FailoverBackend(replicas, LIMITS, 8)
        replicas.go_on_after(2.5, 1)
        deltas = await collect(backend, request())
        assert outputs(deltas, 0) == ALL
        assert len(replicas.tries) == 2

    run(scenario)


def test_nothing_moves_while_a_choice_that_nobody_wants_has_not_ended() -> None:
    """Another replica would not know that it is to end."""

    async def scenario() -> None:
        replicas = Scripted(lambda data: Waiting(data, 1, "full", wait_s=8.0))
        backend = FailoverBackend(replicas, LIMITS, 8)
        replicas.go_on_after(2.5, 0)
        async with aclosing(backend.generate(request(2))) as stream:
            await anext(stream)
            backend.abort("r", 1)
            async for _ in stream:
                pass
        assert len(replicas.tries) == 1

    run(scenario)


def test_a_rival_is_given_up_where_a_choice_is_aborted_meanwhile() -> None:
    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Waiting(data, 2, "full", wait_s=8.0),
            lambda data: Try(data, None, "late", accepts_after_s=1.0),
        )
        backend = FailoverBackend(replicas, LIMITS, 8)
        asyncio.get_running_loop().call_later(0.5, backend.abort, "r", 1)
        replicas.go_on_after(1.5, 0)
        await collect(backend, request(2))
        assert [each.aborted for each in replicas.tries] == [[1], [1]]
        assert (len(replicas.tries), backend.hops.moves) == (2, 0)

    run(scenario)


def test_a_choice_that_is_aborted_meanwhile_ends_once_when_the_replica_dies() -> None:
    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Dying(data, 2, "full", wait_s=8.0),
            lambda data: Waiting(data, 0, "other", wait_s=1.0),
            lambda data: Try(data, None, "healthy"),
        )
        backend = FailoverBackend(replicas, LIMITS, 8)
        asyncio.get_running_loop().call_later(0.25, backend.abort, "r", 1)
        replicas.go_on_after(0.5, 0)
        replicas.go_on_after(0.6, 1)
        deltas = await collect(backend, request(2))
        assert outputs(deltas, 0) == ALL
        ends = [each.finish_reason for each in deltas if each.choice == 1 and each.finish_reason]
        assert ends == [FinishReason.ABORT]
        finished = ChoiceProgress((token(1, 0), token(1, 1)), finished=True)
        assert replicas.sent[2].progress == (ChoiceProgress((0, 1)), finished)

    run(scenario)
