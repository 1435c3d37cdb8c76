"""A preempted request does not wait for room where there is none: it goes on elsewhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.e2e.cluster_process import MODEL, ClusterProcess, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CROWD = 4
MAX_TOKENS = 160


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """Two replicas with room for two whole requests each, and as much on the host as needed."""
    with running(
        tmp_path_factory.mktemp("tight"),
        model={"source": "embedded", "dtype": "float32"},
        engine={
            "block_size": 16,
            "num_gpu_blocks_override": 26,
            "max_model_len": 256,
            "admission": "eager",
            "preemption_mode": "swap",
            "swap_space": 0.1,
        },
        replicas={"count": 2, "threads": 1},
    ) as it:
        it.wait_replicas(2)
        yield it


@dataclass
class Seen:
    """What one client got."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    token_ids: list[int] = field(default_factory=list)
    receipt: dict[str, Any] = field(default_factory=dict)


async def follow(it: AsyncOpenAI, number: int, seen: Seen) -> None:
    stream = await it.completions.create(
        model=MODEL,
        prompt=f"Letter {number} to a friend who lives far away, written on a rainy day:",
        max_tokens=MAX_TOKENS,
        temperature=0.9,
        seed=number,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async with stream:
        async for chunk in stream:
            seen.begun.set()
            if chunk.usage is not None:
                seen.receipt = chunk.usage.to_dict()["quire"]  # type: ignore[assignment]
            for choice in chunk.choices:
                seen.token_ids += choice.token_ids or ()  # type: ignore[attr-defined]


def client(cluster: ClusterProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=300, max_retries=0)


def load(cluster: ClusterProcess) -> Counter[str]:
    """Choices on each replica."""
    replicas = httpx.get(f"{cluster.url}/health").json()["replicas"]
    return Counter({name: it["running"] + it["waiting"] for name, it in replicas.items()})


async def crowd(cluster: ClusterProcess) -> dict[int, Seen]:
    """Requests begin one after the other until one replica has its fill; those on the other are
    given up, so that it has room. Gives what the rest saw, by number."""
    everyone: list[tuple[str, Seen, asyncio.Task[None]]] = []
    before = load(cluster)
    async with client(cluster) as it:
        while not before or max(before.values()) < CROWD:
            seen = Seen()
            task = asyncio.create_task(follow(it, len(everyone), seen))
            await seen.begun.wait()
            after = load(cluster)
            ((home, _),) = (after - before).items()
            everyone.append((home, seen, task))
            before = after
        crowded = before.most_common(1)[0][0]
        for home, _, task in everyone:
            if home != crowded:
                task.cancel()
        await asyncio.wait([task for _, _, task in everyone])
        for home, _, task in everyone:
            if home == crowded:
                task.result()
    return {number: seen for number, (home, seen, _) in enumerate(everyone) if home == crowded}


def test_what_one_replica_has_no_room_for_goes_on_at_the_other(tight: ClusterProcess) -> None:
    async def quiet(number: int) -> Seen:
        seen = Seen()
        async with client(tight) as it:
            await follow(it, number, seen)
        return seen

    crowded = asyncio.run(crowd(tight))
    print([seen.receipt for seen in crowded.values()])
    moved = [seen for seen in crowded.values() if seen.receipt["moves"]]
    assert moved
    assert all(seen.receipt["preemptions"] >= seen.receipt["moves"] for seen in moved)
    assert all(seen.receipt["stall_ms"] > 0 for seen in moved)
    for number, seen in crowded.items():
        assert seen.token_ids == asyncio.run(quiet(number)).token_ids
        assert len(seen.token_ids) == MAX_TOKENS
