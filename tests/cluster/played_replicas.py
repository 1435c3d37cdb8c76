"""Replicas that are played: what follows a request has them as its Dispatcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress

from cluster.failover import FailoverBackend
from cluster.follower import Conditions, FollowLimits, ReplicaLost
from replicas.core.sampling_params import SamplingParams
from replicas.protocol import ChoiceProgress, FinishReason, GenerateRequest, Receipt, TokenDelta
from tests.cluster.virtual_clock import run_virtually

LIMITS = FollowLimits(max_failovers=2, patience_s=5.0, max_moves=1, move_gain=2.0)
TIMEOUT_S = 600.0


def request(n: int = 1, max_tokens: int = 5, prompt_logprobs: int | None = None) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, prompt_logprobs=prompt_logprobs)
    return GenerateRequest("r", (7, 8, 9), sampling, n=n)


def token(choice: int, output_index: int) -> int:
    """What a replica draws: a function of the place alone, as with a seed."""
    return 10_000 * choice + output_index


class Try:
    """Plays one replica, which accepts the request after a while and is lost after `steps`."""

    def __init__(
        self, data: GenerateRequest, steps: int | None, name: str, *, accepts_after_s: float = 0.0
    ) -> None:
        self.replica: str | None = None
        self.placement = f'{{"chosen": "{name}"}}' if data.explain else None
        self.aborted: list[int] = []
        self.closed = False
        self._data = data
        self._steps = steps
        self._name = name
        self._accepts_after_s = accepts_after_s

    def abort(self, choice: int) -> None:
        self.aborted.append(choice)

    async def deltas(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
        try:
            await asyncio.sleep(self._accepts_after_s)
            self.replica = self._name
            async with aclosing(self._play()) as stream:
                async for deltas in stream:
                    yield deltas
        finally:
            self.closed = True

    async def _play(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
        data = self._data
        known = data.progress or (ChoiceProgress(),) * data.n
        produced = {i: len(p.output_token_ids) for i, p in enumerate(known) if not p.finished}
        step = 0
        while produced:
            await asyncio.sleep(0)
            if step == self._steps:
                raise ReplicaLost("it died", self._name)
            yield [self._delta(choice, produced, first=step == 0) for choice in list(produced)]
            step += 1

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
    """Preempted after `steps` steps; tells of it once a second, and goes on when told to."""

    def __init__(self, data: GenerateRequest, steps: int, name: str, *, wait_s: float) -> None:
        super().__init__(data, None, name)
        self.go_on = asyncio.Event()
        self._wait_after = steps
        self._wait_s = wait_s

    async def _play(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
        step = 0
        async with aclosing(super()._play()) as stream:
            async for deltas in stream:
                if step == self._wait_after:
                    async for waits in self._wait():
                        yield waits
                yield deltas
                step += 1

    async def _wait(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
        wait = TokenDelta(
            self._data.request_id, 0, (), receipt=Receipt(preemptions=1), wait_s=self._wait_s
        )
        while not self.go_on.is_set():
            yield [wait]
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.go_on.wait()


class Dying(Waiting):
    """Lost when told to go on."""

    async def _wait(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
        async for waits in super()._wait():
            yield waits
        raise ReplicaLost("it died", self._name)


class Declining(Try):
    """Nobody would be quicker: the router says so after a while."""

    async def deltas(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
        try:
            await asyncio.sleep(self._accepts_after_s)
            for nothing in ():
                yield nothing
        finally:
            self.closed = True


class Failing(Try):
    """Fails of `failure` before anyone has accepted the request."""

    def __init__(self, data: GenerateRequest, failure: Exception) -> None:
        super().__init__(data, None, "nobody")
        self._failure = failure

    async def deltas(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
        try:
            await asyncio.sleep(0)
            for nothing in ():
                yield nothing
            raise self._failure
        finally:
            self.closed = True


class Scripted:
    """A Dispatcher whose tries are given; the last of them again and again."""

    def __init__(self, *makers: Callable[[GenerateRequest], Try]) -> None:
        self.sent: list[GenerateRequest] = []
        self.conditions: list[Conditions] = []
        self.tries: list[Try] = []
        self.began_at: list[float] = []
        self._makers = makers

    def attempt(self, data: GenerateRequest, conditions: Conditions) -> Try:
        self.sent.append(data)
        self.conditions.append(conditions)
        self.began_at.append(asyncio.get_running_loop().time())
        self.tries.append(self._makers[min(len(self.tries), len(self._makers) - 1)](data))
        return self.tries[-1]

    def go_on_after(self, seconds: float, index: int) -> None:
        """Let the try that waits go on by then."""

        def tell() -> None:
            waiting = self.tries[index]
            assert isinstance(waiting, Waiting)
            waiting.go_on.set()

        asyncio.get_running_loop().call_later(seconds, tell)


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
    """Waiting takes no time."""

    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await scenario()

    run_virtually(main())


async def collect(backend: FailoverBackend, data: GenerateRequest) -> list[TokenDelta]:
    async with aclosing(backend.generate(data)) as stream:
        return [delta async for deltas in stream for delta in deltas]


def outputs(deltas: Sequence[TokenDelta], choice: int) -> list[int]:
    return [t for delta in deltas if delta.choice == choice for t in delta.token_ids]
