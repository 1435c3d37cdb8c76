"""Requests followed from replica to replica: nothing lost, repeated or changed on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from cluster.failover import FailoverBackend
from cluster.follower import Conditions, FollowLimits, ReplicaLost
from cluster.openai.service import BackendError, QueueFull
from replicas.core.sampling_params import SamplingParams
from replicas.protocol import ChoiceProgress, FinishReason, GenerateRequest, Receipt, TokenDelta

LIMITS = FollowLimits(max_failovers=2, patience_s=5.0, max_moves=1, move_gain=2.0)


def request(n: int = 1, max_tokens: int = 5, prompt_logprobs: int | None = None) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, prompt_logprobs=prompt_logprobs)
    return GenerateRequest("r", (7, 8, 9), sampling, n=n)


def token(choice: int, output_index: int) -> int:
    """What a replica draws: a function of the place alone, as with a seed."""
    return 100 * choice + output_index


class Try:
    """Plays one replica, which is lost after `steps` steps."""

    def __init__(self, data: GenerateRequest, steps: int | None, name: str) -> None:
        self.placement = f'{{"chosen": "{name}"}}' if data.explain else None
        self.aborted: list[int] = []
        self.closed = False
        self._data = data
        self._steps = steps
        self.replica = name

    def abort(self, choice: int) -> None:
        self.aborted.append(choice)

    async def deltas(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
        data = self._data
        known = data.progress or (ChoiceProgress(),) * data.n
        produced = {i: len(p.output_token_ids) for i, p in enumerate(known) if not p.finished}
        step = 0
        try:
            while produced:
                await asyncio.sleep(0)
                if step == self._steps:
                    raise ReplicaLost("it died", self.replica)
                yield [self._delta(choice, produced, first=step == 0) for choice in list(produced)]
                step += 1
        finally:
            self.closed = True

    def _delta(self, choice: int, produced: dict[int, int], *, first: bool) -> TokenDelta:
        data = self._data
        count = produced[choice] = produced[choice] + 1
        last = count == data.sampling.max_tokens
        receipt = Receipt(cached_tokens=2, preemptions=1) if first or last else None
        if last:
            del produced[choice]
        return TokenDelta(
            data.request_id,
            choice,
            (token(choice, count - 1),),
            finish_reason=FinishReason.LENGTH if last else None,
            receipt=receipt,
        )


class Waiting(Try):
    """Preempted after `steps` steps; goes on when told to."""

    def __init__(self, data: GenerateRequest, steps: int, name: str, *, wait_s: float) -> None:
        super().__init__(data, None, name)
        self.go_on = asyncio.Event()
        self._wait_after = steps
        self._wait_s = wait_s

    async def deltas(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
        step = 0
        async with aclosing(super().deltas()) as stream:
            async for deltas in stream:
                if step == self._wait_after:
                    yield [wait_of(self._data, self._wait_s)]
                    await self.go_on.wait()
                yield deltas
                step += 1


class Declining(Try):
    """Nobody would be quicker."""

    async def deltas(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
        await asyncio.sleep(0)
        for nothing in ():
            yield nothing


def wait_of(data: GenerateRequest, wait_s: float) -> TokenDelta:
    return TokenDelta(data.request_id, 0, (), receipt=Receipt(preemptions=1), wait_s=wait_s)


class Scripted:
    """A Dispatcher whose tries are given."""

    def __init__(self, *makers: Callable[[GenerateRequest], Try]) -> None:
        self.sent: list[GenerateRequest] = []
        self.conditions: list[Conditions] = []
        self.tries: list[Try] = []
        self._makers = makers

    def attempt(self, data: GenerateRequest, conditions: Conditions) -> Try:
        self.sent.append(data)
        self.conditions.append(conditions)
        self.tries.append(self._makers[len(self.tries)](data))
        return self.tries[-1]


class Replicas:
    """A Dispatcher whose tries end after so many steps; the last one lives."""

    def __init__(self, *steps: int) -> None:
        self.sent: list[GenerateRequest] = []
        self.avoided: list[frozenset[str]] = []
        self.patience: list[float | None] = []
        self.tries: list[Try] = []
        self._steps = dict(enumerate(steps))

    def attempt(self, data: GenerateRequest, conditions: Conditions) -> Try:
        number = len(self.tries)
        self.sent.append(data)
        self.avoided.append(conditions.avoid)
        self.patience.append(conditions.patience_s)
        self.tries.append(Try(data, self._steps.get(number), f"replica-{number}"))
        return self.tries[-1]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(5.0):
            await scenario()

    asyncio.run(main())


async def collect(backend: FailoverBackend, data: GenerateRequest) -> list[TokenDelta]:
    async with aclosing(backend.generate(data)) as stream:
        return [delta async for deltas in stream for delta in deltas]


def outputs(deltas: Sequence[TokenDelta], choice: int) -> list[int]:
    return [t for delta in deltas if delta.choice == choice for t in delta.token_ids]


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
        assert (second.output_token_ids, second.finished) == ((100, 101), True)
        (last,) = [d for d in rest if d.choice == 1 and d.finish_reason is not None]
        assert last.finish_reason is FinishReason.ABORT
        assert last.receipt is not None

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


def test_a_request_that_waits_for_kv_goes_on_where_it_need_not() -> None:
    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Waiting(data, 2, "full", wait_s=8.0), lambda data: Try(data, None, "free")
        )
        backend = FailoverBackend(replicas, LIMITS, 8)
        deltas = await collect(backend, request())
        assert outputs(deltas, 0) == [0, 1, 2, 3, 4]
        assert all(delta.wait_s is None for delta in deltas)
        assert replicas.conditions[1] == Conditions(frozenset({"full"}), within_s=4.0)
        assert replicas.sent[1].progress == (ChoiceProgress((0, 1)),)
        receipt = deltas[-1].receipt
        assert receipt is not None
        assert (receipt.moves, receipt.failovers, receipt.preemptions) == (1, 0, 2)
        assert receipt.stall_s > 0
        assert backend.hops.moves == 1
        assert all(each.closed for each in replicas.tries)

    run(scenario)


def test_who_delivers_first_serves_the_request() -> None:
    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Waiting(data, 2, "full", wait_s=8.0),
            lambda data: Waiting(data, 0, "slow", wait_s=9.0),  # it has to wait as well
        )
        backend = FailoverBackend(replicas, LIMITS, 8)
        got: list[TokenDelta] = []
        async with aclosing(backend.generate(request())) as stream:
            async for deltas in stream:
                got += deltas
                if len(outputs(got, 0)) == 2:
                    asyncio.get_running_loop().call_later(0.05, _resume, replicas)
        assert outputs(got, 0) == [0, 1, 2, 3, 4]
        assert [each.closed for each in replicas.tries] == [True, True]
        assert got[-1].receipt is not None
        assert got[-1].receipt.moves == 0

    run(scenario)


def _resume(replicas: Scripted, index: int = 0) -> None:
    waiting = replicas.tries[index]
    assert isinstance(waiting, Waiting)
    waiting.go_on.set()


def test_where_nobody_would_be_quicker_it_waits() -> None:
    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Waiting(data, 2, "full", wait_s=8.0),
            lambda data: Declining(data, None, "nobody"),
        )
        backend = FailoverBackend(replicas, LIMITS, 8)
        asyncio.get_running_loop().call_later(0.05, _resume, replicas)
        deltas = await collect(backend, request())
        assert outputs(deltas, 0) == [0, 1, 2, 3, 4]
        assert backend.hops.moves == 0

    run(scenario)


def test_a_rival_takes_over_from_a_replica_that_dies_in_the_meantime() -> None:
    async def scenario() -> None:
        class Dying(Waiting):
            async def deltas(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
                async with aclosing(super().deltas()) as stream:
                    async for deltas in stream:
                        yield deltas
                        if deltas[0].wait_s is not None:
                            await self.go_on.wait()
                            raise ReplicaLost("it died", "full")

        replicas = Scripted(
            lambda data: Dying(data, 2, "full", wait_s=8.0),
            lambda data: Waiting(data, 0, "other", wait_s=1.0),
        )
        backend = FailoverBackend(replicas, LIMITS, 8)
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, _resume, replicas)
        loop.call_later(0.1, _resume, replicas, 1)
        deltas = await collect(backend, request())
        assert outputs(deltas, 0) == [0, 1, 2, 3, 4]
        assert (backend.hops.failovers, backend.hops.moves) == (1, 0)
        assert len(replicas.tries) == 2

    run(scenario)


def test_moves_are_bounded() -> None:
    async def scenario() -> None:
        replicas = Scripted(
            lambda data: Waiting(data, 2, "full", wait_s=8.0),
            lambda data: Waiting(data, 1, "full too", wait_s=8.0),
        )
        backend = FailoverBackend(replicas, LIMITS, 8)
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, _resume, replicas, 1)
        deltas = await collect(backend, request())
        assert outputs(deltas, 0) == [0, 1, 2, 3, 4]
        assert len(replicas.tries) == 2

    run(scenario)
