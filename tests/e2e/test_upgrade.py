"""A rolling upgrade: every process that serves is replaced, and no stream is cut."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.e2e.cluster_process import MODEL, ClusterProcess, running, write_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STREAMS = 6
BEGUN = 4
"""Tokens that each stream has when the upgrade begins."""
RENAMED = "renamed"
"""What the model is called afterwards: ingress and engine both know its name."""
MORE = 5
"""Tokens that each stream gets after it."""
OUTLAST_S = 8.0
"""For how long an ingress that was replaced goes on with the streams it has."""
PATIENCE_S = 240.0
TITLES = ("ServeReplica:quire:Replica", "ServeReplica:quire:Ingress")
CONFIG: dict[str, Any] = {
    "model": {"source": "embedded", "dtype": "float32"},
    "engine": {"block_size": 16, "num_gpu_blocks_override": 1024, "max_model_len": 2048},
    "replicas": {"count": 1, "threads": 1, "drain_s": 1.0},
}


def upgrade(cluster: ClusterProcess, folder: Path, **args: Any) -> None:
    """Deploy the config with these `args` on the running cluster, whatever serves now."""
    port = httpx.URL(cluster.url).port
    assert port is not None
    cluster.run_driver("upgrade.py", str(write_config(folder, port, **args)))


def serving(cluster: ClusterProcess) -> list[set[int]]:
    """Processes of the engine's replicas, and of the ingress."""
    return [set(cluster.pids(title)) for title in TITLES]


class Streams:
    """Clients that read on until all was replaced, and a little further."""

    def __init__(self, it: AsyncOpenAI) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(STREAMS)]
        self.enough = asyncio.Event()
        self._begun = [asyncio.Event() for _ in range(STREAMS)]
        self.tasks = [asyncio.create_task(self._follow(it, n)) for n in range(STREAMS)]

    async def _follow(self, it: AsyncOpenAI, number: int) -> None:
        stream = await it.completions.create(
            model=MODEL,
            prompt=f"Chapter {number}. It was a long way to the sea, and",
            max_tokens=1900,
            temperature=0.8,
            seed=number,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        more = MORE
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    self.token_ids[number] += choice.token_ids or ()  # type: ignore[attr-defined]
                if len(self.token_ids[number]) >= BEGUN:
                    self._begun[number].set()
                more -= self.enough.is_set()
                if more == 0:
                    return

    async def begun(self) -> None:
        for event in self._begun:
            await event.wait()


async def alone(it: AsyncOpenAI, number: int, tokens: int) -> list[int]:
    answer = await it.completions.create(
        model=RENAMED,
        prompt=f"Chapter {number}. It was a long way to the sea, and",
        max_tokens=tokens,
        temperature=0.8,
        seed=number,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    return answer.choices[0].token_ids  # type: ignore[attr-defined,no-any-return]


def test_streams_outlive_all_that_serves_them(tmp_path: Path) -> None:
    async def disturbed(cluster: ClusterProcess) -> list[list[int]]:
        before = serving(cluster)

        def replaced() -> bool:
            engines, ingresses = serving(cluster)
            return bool(engines) and not engines & before[0] and bool(ingresses - before[1])

        async with client(cluster) as it:
            streams = Streams(it)
            await streams.begun()
            await asyncio.to_thread(upgrade, cluster, tmp_path, **changed)
            deadline = time.monotonic() + PATIENCE_S
            while not replaced() or await served(cluster) != RENAMED:
                assert time.monotonic() < deadline, cluster.log()
                assert not any(task.done() for task in streams.tasks), "they were to outlast it"
                await asyncio.sleep(0.5)
            await asyncio.sleep(OUTLAST_S)
            streams.enough.set()
            await asyncio.gather(*streams.tasks)
            return streams.token_ids

    async def quiet(cluster: ClusterProcess, lengths: list[int]) -> list[list[int]]:
        async with client(cluster) as it:
            return await asyncio.gather(*(alone(it, n, size) for n, size in enumerate(lengths)))

    changed = CONFIG | {"model": CONFIG["model"] | {"served_name": RENAMED}}
    with running(tmp_path, **CONFIG) as cluster:
        found = asyncio.run(disturbed(cluster))
        assert found == asyncio.run(quiet(cluster, list(map(len, found))))


def client(cluster: ClusterProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=600, max_retries=0)


async def served(cluster: ClusterProcess) -> str:
    """The model's name at whichever ingress answers."""
    async with httpx.AsyncClient(timeout=60) as it:
        (card,) = (await it.get(f"{cluster.url}/v1/models")).json()["data"]
        return str(card["id"])
