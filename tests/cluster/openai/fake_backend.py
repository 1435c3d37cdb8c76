"""A backend whose choices say what a script tells them to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from replicas.protocol import (
    FinishReason,
    GenerateRequest,
    Receipt,
    TokenDelta,
    TokenLogprobs,
)

EOS = 2
Script = Callable[[GenerateRequest, int], Sequence[int]]
"""The tokens that a choice would say if it were never stopped."""


def fake_logprobs(token_id: int, position: int, top: int) -> TokenLogprobs:
    """Some log-probabilities that depend on the token and its place."""
    value = -((token_id * 31 + position) % 1000) / 100 - 0.01
    rivals = [(token_id, value)] + [((token_id + 7 * i) % 49152, value - i) for i in range(1, top)]
    return TokenLogprobs(value, 1, tuple(rivals[:top]))


class FakeBackend:
    """Plays `script`, `stride` tokens of each choice a step.

    `error_after` steps the request fails: with an error delta, or with `error` raised.
    With `choice_0_late` choice 0 begins one step after the others, and unless it
    `answers_abort` the last delta of an aborted choice never comes.
    """

    def __init__(
        self,
        script: Script,
        *,
        stride: int = 1,
        step_s: float = 0.0,
        error_after: int | None = None,
        error: BaseException | None = None,
        choice_0_late: bool = False,
        answers_abort: bool = True,
    ) -> None:
        self.requests: list[GenerateRequest] = []
        self.aborted: list[tuple[str, int]] = []
        self.closed: list[str] = []
        self.steps = 0
        self._progress = asyncio.Condition()
        self._script = script
        self._stride = stride
        self._step_s = step_s
        self._error_after = error_after
        self._error = error
        self._choice_0_late = choice_0_late
        self._answers_abort = answers_abort

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Sequence[TokenDelta], None]:
        self.requests.append(request)
        await self._notify()
        choices = {i: _Choice(request, i, self._script(request, i)) for i in range(request.n)}
        try:
            step = 0
            while choices:
                await asyncio.sleep(self._step_s)
                self.steps += 1
                await self._notify()
                yield self._step(request, choices, step)
                step += 1
            if not self._answers_abort:
                await asyncio.Event().wait()
        finally:
            self.closed.append(request.request_id)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that holds after some request's start or step."""
        async with self._progress:
            await self._progress.wait_for(condition)

    async def _notify(self) -> None:
        async with self._progress:
            self._progress.notify_all()

    def abort(self, request_id: str, choice: int) -> None:
        self.aborted.append((request_id, choice))

    def _step(
        self, request: GenerateRequest, choices: dict[int, _Choice], step: int
    ) -> list[TokenDelta]:
        if step == self._error_after:
            if self._error is not None:
                raise self._error
            return [
                TokenDelta(
                    request.request_id, 0, (), finish_reason=FinishReason.ERROR, error="it broke"
                )
            ]
        deltas = []
        for index, choice in list(choices.items()):
            if self._choice_0_late and index == 0 and step == 0:
                continue
            if (request.request_id, index) in self.aborted:
                del choices[index]
                if self._answers_abort:
                    deltas.append(choice.aborted())
                continue
            delta = choice.next_delta(self._stride)
            if delta.finish_reason is not None:
                del choices[index]
            deltas.append(delta)
        return deltas


class _Choice:
    def __init__(self, request: GenerateRequest, index: int, tokens: Sequence[int]) -> None:
        self._request = request
        self._index = index
        self._tokens = [*tokens, EOS] if not request.sampling.ignore_eos else list(tokens)
        self._said = 0

    def next_delta(self, stride: int) -> TokenDelta:
        sampling = self._request.sampling
        token_ids: list[int] = []
        finish = stop_token = None
        first = self._said == 0
        while finish is None and len(token_ids) < stride:
            token = self._tokens[self._said]
            self._said += 1
            token_ids.append(token)
            stops = sampling.stop_token_ids + (() if sampling.ignore_eos else (EOS,))
            if token in stops:
                finish, stop_token = FinishReason.STOP, token
            elif self._said == sampling.max_tokens:
                finish = FinishReason.LENGTH
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.logprobs is not None:
            start = self._said - len(token_ids)
            logprobs = tuple(
                fake_logprobs(token, start + i, sampling.logprobs)
                for i, token in enumerate(token_ids)
            )
        prompt_logprobs = None
        if first and self._index == 0 and sampling.prompt_logprobs is not None:
            prompt_logprobs = tuple(
                fake_logprobs(token, -1 - i, sampling.prompt_logprobs)
                for i, token in enumerate(self._request.prompt_token_ids[1:])
            )
        return TokenDelta(
            self._request.request_id,
            self._index,
            tuple(token_ids),
            logprobs,
            prompt_logprobs,
            finish,
            stop_token,
            self._receipt() if finish else None,
        )

    def aborted(self) -> TokenDelta:
        return TokenDelta(
            self._request.request_id,
            self._index,
            (),
            finish_reason=FinishReason.ABORT,
            receipt=self._receipt(),
        )

    def _receipt(self) -> Receipt:
        return Receipt(
            cached_tokens=3 + self._index,
            host_cached_tokens=2 * self._index + 2,
            preemptions=1,
            swaps=self._index % 2,
            recomputed_tokens=5,
            restored_tokens=7,
            stall_s=0.25,
            queue_s=0.125,
        )


def always(tokens: Sequence[int]) -> Script:
    """Every choice of every request says `tokens`."""
    return lambda request, choice: tokens
