"""A preempted request does not wait for room where there is none: it goes on elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.e2e.cluster_process import MODEL, ClusterProcess, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STREAMS = 8
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


def test_what_one_replica_has_no_room_for_goes_on_at_the_other(tight: ClusterProcess) -> None:
    async def crowd() -> list[Seen]:
        """Requests begin one after the other, on either replica in turn; then every other one
        is given up, so that one replica is crowded and the other has room."""
        everyone = [Seen() for _ in range(STREAMS)]
        async with AsyncOpenAI(
            base_url=f"{tight.url}/v1", api_key="none", timeout=300, max_retries=0
        ) as it:
            tasks = []
            for number, seen in enumerate(everyone):
                tasks.append(asyncio.create_task(follow(it, number, seen)))
                await seen.begun.wait()
            for task in tasks[1::2]:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
        return everyone[::2]

    async def quiet(number: int) -> Seen:
        seen = Seen()
        async with AsyncOpenAI(
            base_url=f"{tight.url}/v1", api_key="none", timeout=300, max_retries=0
        ) as it:
            await follow(it, number, seen)
        return seen

    crowded = asyncio.run(crowd())
    print([seen.receipt for seen in crowded])
    moved = [seen for seen in crowded if seen.receipt["moves"]]
    assert moved
    assert all(seen.receipt["preemptions"] >= seen.receipt["moves"] for seen in moved)
    for number, seen in zip(range(0, STREAMS, 2), crowded, strict=True):
        assert seen.token_ids == asyncio.run(quiet(number)).token_ids
        assert len(seen.token_ids) == MAX_TOKENS
