"""Whatever replicas do to a request on its way, and whenever it is aborted, its stream is right."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.failover import FailoverBackend
from cluster.follower import Conditions, FollowLimits, ReplicaLost
from cluster.openai.service import BackendError, QueueFull
from replicas.protocol import ChoiceProgress, FinishReason, GenerateRequest, Receipt, TokenDelta
from tests.cluster.played_replicas import request, token
from tests.cluster.virtual_clock import run_virtually


class Moody:
    """A try whose replica may do anything that a real one may."""

    placement = None

    def __init__(
        self, rng: random.Random, data: GenerateRequest, conditions: Conditions, name: str
    ) -> None:
        self.replica: str | None = None
        self.begun = self.closed = self.lost = False
        self._aborted: set[int] = set()
        self._rng = rng
        self._data = data
        self._conditions = conditions
        self._name = name
        self._waits = rng.choice([0, 0, 1, 2, 12])

    def abort(self, choice: int) -> None:
        if self.replica is not None:  # else nobody can be told
            self._aborted.add(choice)

    async def deltas(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
        self.begun = True
        try:
            await self._pause()
            accepted = self._conditions.within_s is None or self._rng.random() < 0.5
            if not accepted and self._rng.random() < 0.5:
                return
            if not accepted:
                raise QueueFull("no room for more")
            self._may_die(0.08, None)
            self.replica = self._name
            async with aclosing(self._generate()) as stream:
                async for deltas in stream:
                    yield deltas
        finally:
            self.closed = True

    async def _generate(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
        data = self._data
        known = data.progress or (ChoiceProgress(),) * data.n
        for choice, it in enumerate(known):
            count = len(it.output_token_ids)
            assert it.output_token_ids == tuple(token(choice, index) for index in range(count))
        at = {i: len(it.output_token_ids) for i, it in enumerate(known) if not it.finished}
        while at:
            await self._pause()
            self._may_die(0.06, self._name)
            if self._waits and any(at.values()) and self._rng.random() < 0.4:
                self._waits -= 1
                yield [self._delta(min(at), (), wait_s=self._rng.uniform(0.0, 5.0))]
            elif deltas := self._step(at):
                yield deltas

    def _step(self, at: dict[int, int]) -> list[TokenDelta]:
        deltas = []
        for choice in list(at):
            if choice in self._aborted:
                del at[choice]
                deltas.append(self._delta(choice, (), FinishReason.ABORT))
            elif self._rng.random() < 0.7:
                begin, most = at[choice], self._data.sampling.max_tokens
                end = at[choice] = min(begin + self._rng.choice([1, 2, 30]), most)
                finish = FinishReason.LENGTH if end == most else None
                if finish:
                    del at[choice]
                tokens = tuple(token(choice, index) for index in range(begin, end))
                deltas.append(self._delta(choice, tokens, finish))
        return deltas

    def _delta(
        self,
        choice: int,
        tokens: tuple[int, ...],
        finish: FinishReason | None = None,
        wait_s: float | None = None,
    ) -> TokenDelta:
        return TokenDelta(
            self._data.request_id,
            choice,
            tokens,
            finish_reason=finish,
            receipt=Receipt(preemptions=1),
            wait_s=wait_s,
        )

    def _may_die(self, chance: float, name: str | None) -> None:
        if self._rng.random() < chance:
            self.lost = True
            raise ReplicaLost("it died", name)

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.choice([0.0, 0.0, 0.0, 0.3, 1.5]))


class World:
    """One request, and what became of it."""

    def __init__(self, rng: random.Random) -> None:
        self.tries: list[Moody] = []
        self.n = rng.choice([1, 1, 2, 3])
        self.max_tokens = rng.choice([1, 3, 12, 400])
        self.max_failovers = rng.choice([0, 1, 3, 50])
        self.outputs: dict[int, list[int]] = defaultdict(list)
        self.ends: Counter[int] = Counter()
        self.aborted: set[int] = set()
        limits = FollowLimits(self.max_failovers, 5.0, rng.choice([0, 1, 2, 9]), 2.0)
        self.backend = FailoverBackend(self, limits, 8)
        self._rng = rng

    def attempt(self, data: GenerateRequest, conditions: Conditions) -> Moody:
        name = f"replica-{len(self.tries)}"
        self.tries.append(Moody(self._rng, data, conditions, name))
        return self.tries[-1]

    async def play(self) -> str:
        """How it ended; asserts that the client was told nothing wrong."""
        loop = asyncio.get_running_loop()
        for choice in range(self.n):
            if self._rng.random() < 0.3:
                loop.call_later(self._rng.uniform(0.0, 6.0), self._abort, choice)
        leaves = self._rng.random() < 0.1
        async with aclosing(self.backend.generate(request(self.n, self.max_tokens))) as stream:
            async for deltas in stream:
                for delta in deltas:
                    self._take(delta)
                if leaves and self._rng.random() < 0.2:
                    return "left"
        return "complete"

    def _take(self, delta: TokenDelta) -> None:
        choice = delta.choice
        assert delta.request_id == "r"
        assert delta.wait_s is None
        assert not self.ends[choice], "something comes after the end"
        self.outputs[choice] += delta.token_ids
        self.ends[choice] += delta.finish_reason is not None
        if delta.finish_reason is not None:
            asked = {FinishReason.ABORT} if choice in self.aborted else set()
            assert delta.finish_reason in {FinishReason.LENGTH, *asked}

    def _abort(self, choice: int) -> None:
        if not self.ends[choice]:
            self.aborted.add(choice)
            self.backend.abort("r", choice)


async def live(rng: random.Random) -> str:
    world = World(rng)
    try:
        async with asyncio.timeout(100_000.0):  # of virtual time: a hang
            how = await world.play()
    except BackendError as error:
        how = str(error)
    if how not in ("complete", "left"):
        assert "replicas failed this request" in how
        assert sum(each.lost for each in world.tries) > world.max_failovers
        how = "failed"
    for choice, got in world.outputs.items():
        assert got == [token(choice, index) for index in range(len(got))]
    if how == "complete":
        for choice in range(world.n):
            assert world.ends[choice] == 1
            assert choice in world.aborted or len(world.outputs[choice]) == world.max_tokens
    assert all(each.closed for each in world.tries if each.begun)
    assert not world.backend._open
    return how


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_no_token_is_lost_repeated_or_changed(seed: int) -> None:
    run_virtually(live(random.Random(seed)))
