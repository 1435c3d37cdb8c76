"""The number of replicas follows the load, and no stream is cut when one goes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from openai import AsyncOpenAI

from tests.e2e.cluster_process import MODEL, ClusterProcess, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PATIENCE_S = 180.0
STREAMS = 6
MAX_TOKENS = 1000
MORE = 5
"""Tokens that each stream gets after the replica has gone."""
TITLE = "ServeReplica:quire:Replica"


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """A replica that may become two, or none, and that has a second to finish what runs on it."""
    with running(
        tmp_path_factory.mktemp("elastic"),
        model={"source": "embedded", "dtype": "float32"},
        engine={"block_size": 16, "num_gpu_blocks_override": 512, "max_model_len": 2048},
        limits={"max_queued_requests": STREAMS},
        replicas={
            "count": 1,
            "threads": 1,
            "drain_s": 1.0,
            "autoscaling": {
                "min": 0,
                "max": 2,
                "target_queue_s": 0.5,
                "target_kv_used": 0.9,
                "look_back_s": 3.0,
                "up_delay_s": 1.0,
                "down_delay_s": 4.0,
            },
        },
    ) as it:
        yield it


def until(condition: Callable[[], bool], cluster: ClusterProcess) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, cluster.log()
        time.sleep(0.2)


def reporting(cluster: ClusterProcess) -> int:
    return len(httpx.get(f"{cluster.url}/health", timeout=10).json()["replicas"])


async def tell(
    it: AsyncOpenAI, number: int, max_tokens: int, enough: asyncio.Event | None = None
) -> list[int]:
    """A stream's token ids, to its end or until some have come after there was `enough`."""
    stream = await it.completions.create(
        model=MODEL,
        prompt=f"Chapter {number}. It was a long way to the sea, and",
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    token_ids: list[int] = []
    more = MORE
    async with stream:
        async for chunk in stream:
            for choice in chunk.choices:
                token_ids += choice.token_ids or ()  # type: ignore[attr-defined]
            more -= enough is not None and enough.is_set()
            if more == 0:
                break
    return token_ids


def client(cluster: ClusterProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=600, max_retries=0)


async def streams_while_one_goes(cluster: ClusterProcess) -> list[list[int]]:
    enough = asyncio.Event()
    async with client(cluster) as it:
        tasks = [
            asyncio.create_task(tell(it, number, MAX_TOKENS, enough)) for number in range(STREAMS)
        ]
        await asyncio.to_thread(until, lambda: len(cluster.pids(TITLE)) == 1, cluster)
        assert not any(task.done() for task in tasks), "they were to outlast it"
        enough.set()
        return await asyncio.gather(*tasks)


async def quiet(cluster: ClusterProcess, lengths: list[int]) -> list[list[int]]:
    async with client(cluster) as it:
        return await asyncio.gather(*(tell(it, n, length) for n, length in enumerate(lengths)))


async def burst(cluster: ClusterProcess) -> None:
    """Long prompts, more than may wait, until a second replica has come."""
    async with client(cluster) as it:
        number = 0
        while reporting(cluster) < 2:
            prompts = [f"Page {number + i}. " + "On and on it goes. " * 100 for i in range(8)]
            number += len(prompts)
            await asyncio.gather(
                *(it.completions.create(model=MODEL, prompt=p, max_tokens=1) for p in prompts),
                return_exceptions=True,  # some are one too many
            )
            assert number < 2000


def test_replicas_come_with_the_load_and_go_without_cutting_a_stream(
    elastic: ClusterProcess,
) -> None:
    asyncio.run(burst(elastic))
    assert len(elastic.pids(TITLE)) == 2
    # Light work from here on: one of the two has to go while the streams run on both.
    disturbed = asyncio.run(streams_while_one_goes(elastic))
    until(lambda: reporting(elastic) == 1, elastic)
    moved = counter(elastic, "quire:failovers_total")
    print(f"{moved:.0f} of {STREAMS} streams went on at the other replica")
    assert moved >= 1
    assert disturbed == asyncio.run(quiet(elastic, [len(ids) for ids in disturbed]))
    (left,) = httpx.get(f"{elastic.url}/health").json()["replicas"].values()
    assert (left["running"], left["waiting"], left["used_blocks"]) == (0, 0, 0)


def test_the_last_replica_goes_and_the_next_request_brings_one(elastic: ClusterProcess) -> None:
    """O22: from zero a request waits and is served, not refused."""
    until(lambda: not elastic.pids(TITLE), elastic)
    until(lambda: reporting(elastic) == 0, elastic)
    assert httpx.get(f"{elastic.url}/health").status_code == 200, "it only sleeps"
    begin = time.monotonic()
    (cold,) = asyncio.run(quiet(elastic, [8]))
    print(f"from zero replicas a request was served in {time.monotonic() - begin:.1f} s")
    assert len(cold) == 8
    assert cold == asyncio.run(quiet(elastic, [8]))[0]


def counter(cluster: ClusterProcess, name: str) -> float:
    (value,) = re.findall(
        rf"^{name} (\S+)$", httpx.get(f"{cluster.url}/metrics").text, re.MULTILINE
    )
    return float(value)
