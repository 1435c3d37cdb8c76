"""One replica that hangs, fails or has gone does not silence the others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.broadcast import ask_all

TIMEOUT_S = 0.05


class Result:
    """A replica's answer as Serve hands it out."""

    def __init__(self, answer: Any = None, *, hangs: bool = False) -> None:
        self._answer = answer
        self._hangs = hangs

    async def get_async(self) -> Any:
        if self._hangs:
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Handle:
    """A deployment with these replicas, or none."""

    def __init__(self, *results: Result, fails: Exception | None = None) -> None:
        self._results = results
        self._fails = fails
        self.asked: list[str] = []

    def broadcast(self, method: str) -> Any:
        self.asked.append(method)
        return SimpleNamespace(_fetch_replica_results_async=self._fetch)

    async def _fetch(self) -> list[Result]:
        if self._fails is not None:
            raise self._fails
        return list(self._results)


def ask(handle: Any) -> list[Any] | None:
    return asyncio.run(ask_all(handle, "report", TIMEOUT_S))


def test_all_answer() -> None:
    handle = Handle(Result("one"), Result("two"))
    assert ask(handle) == ["one", "two"]
    assert handle.asked == ["report"]


@pytest.mark.parametrize(
    "odd", [Result(hangs=True), Result(RuntimeError("died"))], ids=["hangs", "fails"]
)
def test_one_is_left_out(odd: Result) -> None:
    assert ask(Handle(Result("one"), odd, Result("two"))) == ["one", "two"]


def test_nobody_answers_in_time() -> None:
    assert ask(Handle(Result(hangs=True))) == []


def test_no_replica_is_told_from_silent_ones() -> None:
    gone = DeploymentUnavailableError(DeploymentID("Replica", "quire"))
    assert ask(Handle(fails=gone)) is None


def test_a_router_that_knows_nothing_yet_costs_no_more_than_the_timeout() -> None:
    class Unready(Handle):
        async def _fetch(self) -> list[Result]:
            await asyncio.Event().wait()
            raise AssertionError

    assert ask(Unready()) == []


def test_a_cancellation_is_passed_on() -> None:
    async def run() -> None:
        task = asyncio.create_task(ask_all(Handle(Result(hangs=True)), "report", 60.0))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
