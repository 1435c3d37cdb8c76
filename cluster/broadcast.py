"""One question to every replica of a deployment, and the answers that come in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle


class _Result(Protocol):
    """A replica's answer to come, as Serve holds it."""

    def get_async(self) -> Awaitable[Any]: ...


async def ask_all(handle: DeploymentHandle[Any], method: str, timeout_s: float) -> list[Any] | None:
    """What the replicas answered within `timeout_s`; None where there is no replica.

    One that fails or is late is left out. Serve's own `results_async` has no answer at all where
    one replica is late: a single one that hangs would empty /metrics and fail /health for all.
    Hence its results, which it keeps private, are awaited one by one.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    response = handle.broadcast(method)
    try:
        async with asyncio.timeout_at(deadline):
            results = await response._fetch_replica_results_async()
    except DeploymentUnavailableError:
        return None
    except TimeoutError:
        return []
    answers = await asyncio.gather(
        *(_answer(result, deadline) for result in results), return_exceptions=True
    )
    return [answer for answer in answers if not isinstance(answer, BaseException)]


async def _answer(result: _Result, deadline: float) -> Any:
    async with asyncio.timeout_at(deadline):
        return await result.get_async()
