"""A deadline counts wherever the request is: waiting for a replica, failing over, moving."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest

from cluster.failover import FailoverBackend
from cluster.follower import Conditions, FollowLimits, ReplicaLost
from cluster.tokenizer import Tokenizer
from replicas.protocol import GenerateRequest, Receipt, TokenDelta
from tests.cluster.openai.harness import events
from tests.cluster.openai.slow_front import BODY, OWN, Slow

FOLLOW = FollowLimits(max_failovers=3, patience_s=60.0, max_moves=1, move_gain=2.0)


class Scene:
    """A FailoverBackend whose tries are played by `plays`, one after the other."""

    def __init__(self, *plays: Callable[[GenerateRequest], AsyncGenerator[Any, None]]) -> None:
        self.noted: list[tuple[int, float]] = []
        self.began: list[Conditions] = []
        self.closed = 0
        self.backend = FailoverBackend(self, FOLLOW, 8, self._note)
        self._plays = plays

    def _note(self, request: GenerateRequest, tokens: int, arrived_at: float) -> None:
        self.noted.append((tokens, arrived_at))

    def attempt(self, request: GenerateRequest, conditions: Conditions) -> Played:
        self.began.append(conditions)
        return Played(self, self._plays[len(self.began) - 1](request))


class Played:
    """One try."""

    replica = "somewhere"
    placement = None

    def __init__(self, scene: Scene, play: AsyncGenerator[Any, None]) -> None:
        self._scene = scene
        self._play = play

    def abort(self, choice: int) -> None:
        raise AssertionError("a deadline ends the whole request")

    async def deltas(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
        try:
            async for deltas in self._play:
                yield deltas
        finally:
            self._scene.closed += 1


async def never(request: GenerateRequest) -> AsyncGenerator[Any, None]:
    """No replica takes it: there is none, or none has room."""
    await asyncio.Event().wait()
    yield ()


async def dies(request: GenerateRequest) -> AsyncGenerator[Any, None]:
    """Two tokens in two seconds, then the replica is lost."""
    for _ in range(2):
        await asyncio.sleep(1.0)
        yield [TokenDelta(request.request_id, 0, (28,))]
    raise ReplicaLost("it died", "somewhere")


async def preempted(request: GenerateRequest) -> AsyncGenerator[Any, None]:
    """Two tokens in two seconds, then it is swapped out, and waits."""
    for _ in range(2):
        await asyncio.sleep(1.0)
        yield [TokenDelta(request.request_id, 0, (28,))]
    yield [TokenDelta(request.request_id, 0, (), receipt=Receipt(preemptions=1), wait_s=50.0)]
    await asyncio.Event().wait()


async def declines(request: GenerateRequest) -> AsyncGenerator[Any, None]:
    """Nobody would be quicker."""
    await asyncio.sleep(0.5)
    for nothing in ():
        yield nothing


@pytest.mark.parametrize(
    ("plays", "tokens"),
    [
        ((never,), 0),
        ((preempted, never), 2),
        ((preempted, declines), 2),
        ((dies, never), 2),
        ((dies, dies, dies), 4),
        ((dies, preempted, never), 4),
    ],
    ids=lambda plays: "-".join(p.__name__ for p in plays) if isinstance(plays, tuple) else None,
)
@pytest.mark.parametrize("stream", [True, False])
def test_waiting_failing_over_and_moving_count(
    tokenizer: Tokenizer, plays: tuple[Any, ...], tokens: int, stream: bool
) -> None:
    """Wherever the request is when its time is over, each of its tries is ended, and what it
    got is in the trace."""
    scene = Scene(*plays)
    slow = Slow(tokenizer, scene.backend)
    response = slow.post(**BODY, stream=stream, timeout_s=4.5)
    assert slow.ended_at == pytest.approx(4.5)
    assert scene.closed == len(scene.began) == len(plays)
    assert scene.noted == [(tokens, 0.0)]
    assert scene.backend._open == {}
    assert slow.timeouts == 1
    begun = stream and tokens
    assert response.status_code == (200 if begun else 504)
    last = events(response.content)[-1] if begun else json.loads(response.content)
    assert last == {"error": OWN}


def test_patience_that_ends_first_is_told_as_such(tokenizer: Tokenizer) -> None:
    scene = Scene(dies, dies, dies, dies)
    slow = Slow(tokenizer, scene.backend)
    *_, last = events(slow.post(**BODY, stream=True, timeout_s=60).content)
    assert "4 replicas failed this request" in last["error"]["message"]
    assert (slow.ended_at, slow.timeouts) == (pytest.approx(8.0), 0)
