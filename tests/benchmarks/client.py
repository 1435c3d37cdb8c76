"""A closed loop of users who stream completions, as with any OpenAI client."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from typing import Any

import aiohttp

from tests.benchmarks.figures import Served
from tests.benchmarks.plan import Run
from tests.benchmarks.prompts import Prompt


def drive(url: str, model: str, run: Run) -> list[Served]:
    """Serve a run to its end through `url`/v1/completions.

    Raises:
        RuntimeError: the server refused a request or failed.
    """
    return asyncio.run(_drive(f"{url}/v1/completions", model, run))


async def _drive(url: str, model: str, run: Run) -> list[Served]:
    waiting = deque(run.prompts)
    served: list[Served] = []
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def user() -> None:
            while waiting:
                body = _body(model, waiting.popleft(), run.workload.new_tokens)
                served.append(await _request(session, url, body))

        async with asyncio.TaskGroup() as users:
            for _ in range(run.workload.users):
                users.create_task(user())
    return served


def _body(model: str, prompt: Prompt, new_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt.text,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _request(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Served:
    sent = time.perf_counter()
    first = last = None
    tokens = 0
    async with session.post(url, json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(str(event["error"])[:500])
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            if event["choices"]:
                last = time.perf_counter()
                if first is None and event["choices"][0]["text"]:
                    first = last
    if first is None or last is None:
        raise RuntimeError("the stream ended without a token")
    return Served(sent, first, last, tokens)
