"""Requests followed from replica to replica: nothing lost, repeated or changed on the way."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.failover import FailoverBackend
from cluster.losses import PROGRESS_TOKENS
from cluster.openai.service import BackendError, QueueFull
from replicas.protocol import ChoiceProgress, FinishReason
from tests.cluster.played_replicas import (
    LIMITS,
    Replicas,
    Scripted,
    Try,
    collect,
    outputs,
    request,
    run,
    token,
)


@pytest.mark.parametrize("steps", [(), (0,), (1,), (4,), (2, 1), (0, 0), (3, 0)])
@pytest.mark.parametrize("n", [1, 3])
def test_a_lost_replica_takes_no_token_with_it(n: int, steps: tuple[int, ...]) -> None:
    async def scenario() -> None:
        replicas = Replicas(*steps)
        backend = FailoverBackend(replicas, LIMITS, 8)
        deltas = await collect(backend, request(n))
        for choice in range(n):
            assert outputs(deltas, choice) == [token(choice, i) for i in range(5)]
        assert {delta.request_id for delta in deltas} == {"r"}
        assert len({data.request_id for data in replicas.sent}) == len(steps) + 1
        assert [data.prompt_token_ids for data in replicas.sent] == [(7, 8, 9)] * (len(steps) + 1)
        assert [data.sampling for data in replicas.sent] == [request().sampling] * len(
            replicas.sent
        )
        assert replicas.avoided == [
            frozenset(f"replica-{i}" for i in range(number)) for number in range(len(steps) + 1)
        ]
        assert replicas.patience == [None, *[5.0] * len(steps)]
        assert backend.hops.failovers == len(steps)
        assert all(each.closed for each in replicas.tries)

    run(scenario)


def test_the_receipt_counts_hops_and_adds_up_costs() -> None:
    async def scenario() -> None:
        deltas = await collect(FailoverBackend(Replicas(2, 1), LIMITS, 8), request())
        receipt = deltas[-1].receipt
        assert receipt is not None
        assert (receipt.failovers, receipt.preemptions, receipt.cached_tokens) == (2, 3, 2)

    run(scenario)


def test_choices_that_ended_are_not_sent_again() -> None:
    async def scenario() -> None:
        replicas = Replicas(2)
        backend = FailoverBackend(replicas, LIMITS, 8)
        stream = backend.generate(request(2))
        async with aclosing(stream):
            await anext(stream)
            backend.abort("r", 1)
            assert replicas.tries[0].aborted == [1]
            rest = [delta async for deltas in stream for delta in deltas]
        first, second = replicas.sent[1].progress
        assert (first.output_token_ids, first.finished) == ((0, 1), False)
        assert (second.output_token_ids, second.finished) == ((token(1, 0), token(1, 1)), True)
        (last,) = [d for d in rest if d.choice == 1 and d.finish_reason is not None]
        assert last.finish_reason is FinishReason.ABORT
        assert last.receipt is not None

    run(scenario)


def test_a_choice_that_ended_before_anything_came_is_not_sent_either() -> None:
    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Try(data, 0, "lost", accepts_after_s=1.0),
            lambda data: Try(data, None, "healthy"),
        )
        backend = FailoverBackend(replicas, LIMITS, 8)
        asyncio.get_running_loop().call_later(0.5, backend.abort, "r", 1)
        deltas = await collect(backend, request(2, prompt_logprobs=3))
        assert outputs(deltas, 0) == [0, 1, 2, 3, 4]
        ends = [each.finish_reason for each in deltas if each.choice == 1]
        assert ends == [FinishReason.ABORT]
        assert replicas.sent[1].progress == (ChoiceProgress(), ChoiceProgress(finished=True))
        assert replicas.sent[1].sampling.prompt_logprobs == 3  # they have not come yet

    run(scenario)


def test_a_request_of_which_nobody_wants_more_ends_with_its_replica() -> None:
    async def scenario() -> None:
        replicas = Replicas(1)
        backend = FailoverBackend(replicas, LIMITS, 8)
        async with aclosing(backend.generate(request())) as stream:
            await anext(stream)
            backend.abort("r", 0)
            rest = [delta async for deltas in stream for delta in deltas]
        assert [delta.finish_reason for delta in rest] == [FinishReason.ABORT]
        assert len(replicas.tries) == 1

    run(scenario)


def test_prompt_logprobs_come_once() -> None:
    async def scenario() -> None:
        replicas = Replicas(0, 2)
        await collect(FailoverBackend(replicas, LIMITS, 8), request(prompt_logprobs=3))
        wanted = [data.sampling.prompt_logprobs for data in replicas.sent]
        assert wanted == [3, 3, None]  # nothing had come from the first one

    run(scenario)


def test_retries_are_bounded() -> None:
    async def scenario() -> None:
        replicas = Replicas(1, 1, 1)
        with pytest.raises(BackendError, match=r"3 replicas failed this request.*it died"):
            await collect(FailoverBackend(replicas, LIMITS, 8), request())
        assert len(replicas.tries) == 3

    run(scenario)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_comes_on_outlives_any_number_of_replicas(n: int) -> None:
    async def scenario() -> None:
        replicas = Replicas(*[PROGRESS_TOKENS] * 5)
        backend = FailoverBackend(replicas, LIMITS, 8)
        deltas = await collect(backend, request(n, max_tokens=400))
        for choice in range(n):
            assert outputs(deltas, choice) == [token(choice, i) for i in range(400)]
        assert backend.hops.failovers == 5

    run(scenario)


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_ends_whoever_serves_it_is_given_up(n: int) -> None:
    """However many replicas outlived it before, and though it gets some tokens on each."""

    async def scenario() -> None:
        few = PROGRESS_TOKENS - 1
        replicas = Replicas(PROGRESS_TOKENS, PROGRESS_TOKENS, few, few, few)
        with pytest.raises(BackendError, match="3 replicas failed this request"):
            await collect(FailoverBackend(replicas, LIMITS, 8), request(n, max_tokens=400))
        assert len(replicas.tries) == 4

    run(scenario)


def test_what_nobody_wants_more_of_does_not_fail_for_want_of_retries() -> None:
    async def scenario() -> None:
        backend = FailoverBackend(Replicas(1), replace(LIMITS, max_failovers=0), 8)
        async with aclosing(backend.generate(request())) as stream:
            await anext(stream)
            backend.abort("r", 0)
            rest = [delta async for deltas in stream for delta in deltas]
        assert [delta.finish_reason for delta in rest] == [FinishReason.ABORT]
        assert backend.hops.failovers == 0

    run(scenario)


def test_placements_are_told_where_the_request_asks_for_them() -> None:
    async def scenario() -> None:
        data = replace(request(), explain=True)
        deltas = await collect(FailoverBackend(Replicas(2), LIMITS, 8), data)
        receipt = deltas[-1].receipt
        assert receipt is not None
        assert receipt.placements == ('{"chosen": "replica-0"}', '{"chosen": "replica-1"}')

    run(scenario)


def test_a_cancellation_ends_the_try_and_is_not_swallowed() -> None:
    async def scenario() -> None:
        replicas = Replicas()
        backend = FailoverBackend(replicas, LIMITS, 8)
        begun = asyncio.Event()

        async def client() -> None:
            async with aclosing(backend.generate(request(max_tokens=10**6))) as stream:
                async for _ in stream:
                    begun.set()

        task = asyncio.create_task(client())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert replicas.tries[0].closed
        assert len(replicas.tries) == 1

    run(scenario)


def test_each_ended_request_is_noted_with_all_its_tokens() -> None:
    async def scenario() -> None:
        noted: list[tuple[str, int, float]] = []
        backend = FailoverBackend(
            Replicas(2),
            LIMITS,
            8,
            lambda data, count, at: noted.append((data.request_id, count, at)),
        )
        before = asyncio.get_running_loop().time()
        await collect(backend, request(n=2))
        ((name, count, at),) = noted
        assert (name, count) == ("r", 10)
        assert before <= at <= asyncio.get_running_loop().time()

    run(scenario)


def test_no_more_requests_than_allowed_are_open() -> None:
    async def scenario() -> None:
        backend = FailoverBackend(Replicas(), LIMITS, 1)
        async with aclosing(backend.generate(request())) as first:
            await anext(first)
            with pytest.raises(QueueFull, match="1 requests are in work"):
                await anext(backend.generate(replace(request(), request_id="other")))
        assert len(await collect(backend, request())) == 5

    run(scenario)
