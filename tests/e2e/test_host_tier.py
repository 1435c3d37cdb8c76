"""Preemption by swap on the real cluster: KV in Ray's object store, which outlives its replica."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.e2e.cluster_process import MODEL, READY_S, ClusterProcess, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ENGINE = {
    "block_size": 16,
    "num_gpu_blocks_override": 24,
    "max_model_len": 256,
    "admission": "eager",
    "preemption_mode": "swap",
    "swap_space": 0.1,
    "spill_prefix_tokens": 64,
    "min_progress_tokens": 4,
}
"""A pool of 384 tokens, and more than a hundred blocks on the host."""


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """One replica with too little KV."""
    with running(
        tmp_path_factory.mktemp("tight"),
        model={"source": "embedded", "dtype": "float32"},
        engine=ENGINE,
        replicas={"count": 1, "threads": 1},
    ) as it:
        yield it


def counter(cluster: ClusterProcess, name: str) -> float:
    text = httpx.get(f"{cluster.url}/metrics").text
    found = re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def snapshot(cluster: ClusterProcess) -> dict[str, Any]:
    (it,) = httpx.get(f"{cluster.url}/health").json()["replicas"].values()
    return dict(it)


async def complete(it: AsyncOpenAI, prompt: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    answer = await it.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=1.0,
        seed=11,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    return answer.choices[0].text, answer.usage.to_dict()


async def stream(cluster: ClusterProcess, prompt: str, kill: int | None = None) -> str:
    """The text; a process is killed once some of it has come."""
    async with AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", timeout=600, max_retries=0
    ) as it:
        parts = []
        async for chunk in await it.completions.create(
            model=MODEL, prompt=prompt, max_tokens=40, temperature=0, stream=True
        ):
            parts.append(chunk.choices[0].text)
            if kill is not None and len(parts) == 8:
                os.kill(kill, signal.SIGKILL)
        return "".join(parts)


def test_swapped_answers_are_those_of_quiet_ones(tight: ClusterProcess) -> None:
    prompts = [f"Story number {i}. " + "The fox and the hare walked on. " * 3 for i in range(8)]

    async def together() -> list[tuple[str, dict[str, Any]]]:
        async with AsyncOpenAI(
            base_url=f"{tight.url}/v1", api_key="none", timeout=600, max_retries=0
        ) as it:
            return await asyncio.gather(*(complete(it, prompt, 60) for prompt in prompts))

    async def one_by_one() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{tight.url}/v1", api_key="none", timeout=600, max_retries=0
        ) as it:
            return [(await complete(it, prompt, 60))[0] for prompt in prompts]

    disturbed = asyncio.run(together())
    receipts = [usage["quire"] for _, usage in disturbed]
    assert sum(receipt["preemptions"] for receipt in receipts) >= 3
    assert sum(receipt["restored_tokens"] for receipt in receipts) >= 100
    preempted = [receipt for receipt in receipts if receipt["preemptions"]]
    assert {receipt["mode"] for receipt in preempted} <= {"swap", "mixed"}
    assert all(receipt["stall_ms"] > 0 for receipt in preempted)
    assert counter(tight, "quire:host_written_bytes_total") > 0
    assert counter(tight, "quire:host_read_bytes_total") > 0
    assert counter(tight, "quire:preemption_stall_seconds_count") >= 3
    assert [text for text, _ in disturbed] == asyncio.run(one_by_one())
    left = snapshot(tight)
    assert (left["used_blocks"], left["pinned_host_blocks"], left["copies"]) == (0, 0, 0)


def test_host_memory_outlives_the_replica_and_the_keeper(tight: ClusterProcess) -> None:
    """The successor adopts the slab of a replica that was killed; without a keeper it works on."""
    prefix = "Once upon a time there were three bears who lived in a wood. " * 8

    async def ask(prompt: str) -> dict[str, Any]:
        async with AsyncOpenAI(
            base_url=f"{tight.url}/v1", api_key="none", timeout=600, max_retries=0
        ) as it:
            return (await complete(it, prompt, 2))[1]

    asyncio.run(ask(prefix))
    for number in range(4):  # each evicts what was there
        asyncio.run(ask(f"{number} is a number. " + "Count from there, up and down. " * 24))
    before = snapshot(tight)
    assert before["host_blocks"] > 0

    (replica,) = tight.pids("ServeReplica:quire:Replica")
    story = "A story of a single replica."
    quiet = asyncio.run(stream(tight, story))
    # The only replica goes in the middle: its successor finishes what it had begun.
    assert asyncio.run(stream(tight, story, kill=replica)) == quiet
    deadline = time.monotonic() + READY_S
    while tight.pids("ServeReplica:quire:Replica") in ([], [replica]):
        assert time.monotonic() < deadline, tight.log()
        time.sleep(0.5)
    tight.wait_ready()
    usage = asyncio.run(ask(prefix))
    assert usage["quire"]["cached_tokens"] == 0, "a new replica has nothing on its device"
    assert usage["quire"]["host_cached_tokens"] >= 64

    (keeper,) = tight.pids("ray::Keeper")
    os.kill(keeper, signal.SIGKILL)
    asyncio.run(ask("4 is a number. " + "Count from there, up and down. " * 24))
    assert asyncio.run(ask(prefix))["prompt_tokens_details"]["cached_tokens"] >= 64
