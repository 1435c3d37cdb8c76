"""The engine's thread: what reaches the event loop, and what happens when it breaks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from replicas.config import EngineConfig
from replicas.core.scheduler_output import StepOutcome
from replicas.engine.async_engine import AsyncEngine
from replicas.engine.engine import Engine
from replicas.models.hf_adapter import PagedModel
from replicas.protocol import EngineInfo, FinishReason, GenerateRequest, TokenDelta
from tests.replicas.engine.driver import ask, make_engine
from tests.replicas.engine.tiny_models import Twin, random_prompt

PATIENCE_S = 30.0


class Front:
    """An AsyncEngine whose deltas arrive on the event loop, as a deployment takes them."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[TokenDelta] = asyncio.Queue()
        self.threads: set[str] = set()
        self.engine = AsyncEngine(build, self._deliver)

    async def next(self) -> TokenDelta:
        return await asyncio.wait_for(self._arrived.get(), PATIENCE_S)

    async def until_finished(self, *choices: tuple[str, int]) -> list[TokenDelta]:
        """All deltas until each of these choices has ended."""
        waiting, deltas = set(choices), []
        while waiting:
            delta = await self.next()
            deltas.append(delta)
            if delta.finish_reason is not None:
                waiting.remove((delta.request_id, delta.choice))
        return deltas

    def _deliver(self, outcome: StepOutcome, engine: Engine) -> None:
        assert isinstance(engine, Engine)
        self.threads.add(threading.current_thread().name)
        for delta in outcome.deltas:
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, delta)


def run_with(
    build: Callable[[], Engine], test: Callable[[Front, EngineInfo], Awaitable[None]]
) -> None:
    """Start an engine, test it and stop it; the thread must end."""

    async def main() -> None:
        front = Front(build)
        info = await asyncio.wait_for(front.engine.start(), PATIENCE_S)
        try:
            await test(front, info)
        finally:
            await asyncio.wait_for(asyncio.to_thread(front.engine.stop), PATIENCE_S)
        assert front.threads <= {"engine"}
        assert "engine" not in {thread.name for thread in threading.enumerate()}

    asyncio.run(main())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def token_ids(deltas: list[TokenDelta], request_id: str, choice: int = 0) -> list[int]:
    mine = [d for d in deltas if (d.request_id, d.choice) == (request_id, choice)]
    return [token for delta in mine for token in delta.token_ids]


def test_deltas_of_all_choices_arrive_on_the_loop(llama: Twin) -> None:
    async def test(front: Front, info: EngineInfo) -> None:
        assert (info.num_blocks, info.vocab_size) == (256, 192)
        front.engine.submit(ask("one", random_prompt(9), 12))
        front.engine.submit(ask("two", random_prompt(20), 6, n=2))
        deltas = await front.until_finished(("one", 0), ("two", 0), ("two", 1))
        assert token_ids(deltas, "one") == llama.generate(random_prompt(9), 12)
        expected = llama.generate(random_prompt(20), 6)
        assert token_ids(deltas, "two", 0) == token_ids(deltas, "two", 1) == expected
        assert all(d.finish_reason in (None, FinishReason.LENGTH) for d in deltas)

        await asyncio.sleep(0.05)  # idle; the thread sleeps and must wake up again
        assert front.engine.failure(patience_s=0.0) is None
        front.engine.submit(ask("three", random_prompt(9), 3))
        later = await front.until_finished(("three", 0))
        assert token_ids(later, "three") == llama.generate(random_prompt(9), 3)

    run_with(lambda: make_engine(llama.paged), test)


def test_a_refusal_comes_as_a_delta(llama: Twin) -> None:
    async def test(front: Front, _: EngineInfo) -> None:
        front.engine.submit(ask("long", random_prompt(2050)))
        front.engine.submit(ask("fine", random_prompt(5), 2))
        refusal = await front.next()
        assert (refusal.request_id, refusal.finish_reason) == ("long", FinishReason.ERROR)
        assert "2050 tokens and one more do not fit" in (refusal.error or "")
        assert len(token_ids(await front.until_finished(("fine", 0)), "fine")) == 2
        assert front.engine.failure(PATIENCE_S) is None

    run_with(lambda: make_engine(llama.paged), test)


def test_aborts_end_a_choice_or_a_request_and_leave_nothing(llama: Twin) -> None:
    engines: list[Engine] = []

    def build() -> Engine:
        engines.append(make_engine(llama.paged))
        return engines[0]

    async def test(front: Front, _: EngineInfo) -> None:
        front.engine.submit(ask("endless", random_prompt(5), 500, n=3))
        await front.next()
        front.engine.abort("endless", 1)
        front.engine.abort("unknown")
        one = await front.until_finished(("endless", 1))
        assert one[-1].finish_reason == FinishReason.ABORT
        assert one[-1].receipt is not None
        front.engine.abort("endless")
        rest = await front.until_finished(("endless", 0), ("endless", 2))
        assert {d.choice for d in rest} == {0, 2}
        front.engine.submit(ask("gone before it began", random_prompt(5)))
        front.engine.abort("gone before it began")
        await front.until_finished(("gone before it began", 0))

    run_with(build, test)
    assert engines[0].snapshot().used_blocks == 0
    engines[0].check_integrity()


class BrokenEngine(Engine):
    """Fails in its third step."""

    def __init__(self, model: PagedModel) -> None:
        super().__init__(EngineConfig(num_gpu_blocks_override=64), model, "cpu")
        self._steps = 0

    def step(self) -> StepOutcome:
        self._steps += 1
        if self._steps == 3:
            raise RuntimeError("out of luck")
        return super().step()


def test_a_step_that_fails_ends_all_requests_and_all_later_ones(llama: Twin) -> None:
    async def test(front: Front, _: EngineInfo) -> None:
        front.engine.submit(ask("a", random_prompt(5)))
        front.engine.submit(ask("b", random_prompt(6), n=2))
        deltas = await front.until_finished(("a", 0), ("b", 0))
        errors = {d.request_id: d.error for d in deltas if d.finish_reason is not None}
        assert errors.keys() == {"a", "b"}
        assert all("out of luck" in (error or "") for error in errors.values())
        assert "out of luck" in (front.engine.failure(PATIENCE_S) or "")

        front.engine.abort("a")
        front.engine.submit(ask("c", random_prompt(5)))
        (late,) = await front.until_finished(("c", 0))
        assert late.finish_reason == FinishReason.ERROR
        assert "out of luck" in (late.error or "")

    run_with(lambda: BrokenEngine(llama.paged), test)


class UnlistedError(Exception):
    """Nothing that an engine expects."""


class RefusingEngine(Engine):
    """Fails when it is given a request whose id begins with `bad`."""

    def add(self, request: GenerateRequest) -> None:
        if request.request_id.startswith("bad"):
            raise UnlistedError("no such thing")
        super().add(request)


def test_a_request_that_breaks_the_engine_is_told_and_so_are_those_behind_it(llama: Twin) -> None:
    config = EngineConfig(num_gpu_blocks_override=64)

    async def test(front: Front, _: EngineInfo) -> None:
        names = ("good", "bad", "behind")
        for name in names:
            front.engine.submit(ask(name, random_prompt(5), 400))
        deltas = await front.until_finished(*((name, 0) for name in names))
        errors = {d.request_id: d.error for d in deltas if d.finish_reason is not None}
        assert errors.keys() == set(names)
        assert all("no such thing" in (error or "") for error in errors.values())

    run_with(lambda: RefusingEngine(config, llama.paged, "cpu"), test)


def test_an_engine_that_hangs_is_unhealthy_until_it_moves_again(llama: Twin) -> None:
    released = threading.Event()

    class HangingEngine(Engine):
        def step(self) -> StepOutcome:
            assert released.wait(PATIENCE_S)
            return super().step()

    async def test(front: Front, _: EngineInfo) -> None:
        front.engine.submit(ask("a", random_prompt(5), 2))
        await asyncio.to_thread(wait_until, lambda: front.engine.failure(0.01) is not None)
        assert "no step has ended for 0.01 s" in (front.engine.failure(patience_s=0.01) or "")
        assert front.engine.failure(patience_s=60.0) is None
        released.set()
        await front.until_finished(("a", 0))
        await asyncio.to_thread(wait_until, lambda: front.engine.failure(0.0) is None)

    config = EngineConfig(num_gpu_blocks_override=64)
    try:
        run_with(lambda: HangingEngine(config, llama.paged, "cpu"), test)
    finally:
        released.set()


def test_an_engine_that_cannot_be_built_says_so_at_the_start() -> None:
    def build() -> Engine:
        raise UnlistedError("no model here")

    async def main() -> None:
        engine = AsyncEngine(build, lambda outcome, engine: None)
        with pytest.raises(UnlistedError, match="no model here"):
            await asyncio.wait_for(engine.start(), PATIENCE_S)
        engine.stop()

    asyncio.run(main())


def test_stopping_does_not_wait_for_unfinished_work(llama: Twin) -> None:
    async def test(front: Front, _: EngineInfo) -> None:
        front.engine.submit(ask("endless", random_prompt(5), 500))
        await front.next()

    run_with(lambda: make_engine(llama.paged), test)


def test_the_engine_is_built_on_its_own_thread(llama: Twin) -> None:
    builders = []

    def build() -> Engine:
        builders.append(threading.current_thread().name)
        return make_engine(llama.paged)

    async def test(front: Front, _: EngineInfo) -> None:
        assert front.engine.failure(PATIENCE_S) is None

    run_with(build, test)
    assert builders == ["engine"]
