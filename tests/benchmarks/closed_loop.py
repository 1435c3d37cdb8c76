"""Drives an engine that is stepped by its caller, as users in a closed loop would."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from tests.benchmarks.figures import Served
from tests.benchmarks.plan import Run
from tests.benchmarks.prompts import Prompt


class Progress(NamedTuple):
    """What a step added to a request."""

    request_id: str
    new_tokens: int
    ended: bool


class Stepped(Protocol):
    """An engine that computes only when it is told to."""

    def add(self, request_id: str, prompt: Prompt, new_tokens: int) -> None: ...

    def step(self) -> Iterable[Progress]: ...


class _Live:
    """A request under way."""

    def __init__(self, sent: float) -> None:
        self.sent = sent
        self.first: float | None = None
        self.tokens = 0


def drive(engine: Stepped, run: Run) -> list[Served]:
    """Serve a run to its end; `users` requests are under way while there are enough."""
    waiting = deque(enumerate(run.prompts))
    live: dict[str, _Live] = {}
    done: list[Served] = []

    def send() -> None:
        number, prompt = waiting.popleft()
        live[str(number)] = _Live(time.perf_counter())
        engine.add(str(number), prompt, run.workload.new_tokens)

    for _ in range(run.workload.users):
        send()
    while live:
        progress = engine.step()
        now = time.perf_counter()
        for request_id, new_tokens, ended in progress:
            request = live[request_id]
            request.tokens += new_tokens
            if new_tokens and request.first is None:
                request.first = now
            if not ended:
                continue
            done.append(Served(request.sent, request.first or now, now, request.tokens))
            del live[request_id]
            if waiting:
                send()
    return done
