"""/health and /metrics while replicas are busy, or hang."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import time
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.e2e.cluster_process import MODEL, ClusterProcess
from tests.e2e.conftest import REPLICAS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def replicas(cluster: ClusterProcess) -> dict[str, dict[str, Any]]:
    answer = httpx.get(f"{cluster.url}/health", timeout=30)
    assert answer.status_code == 200, answer.text
    found: dict[str, dict[str, Any]] = answer.json()["replicas"]
    return found


def measured(cluster: ClusterProcess) -> set[str]:
    """The replicas in /metrics."""
    text = httpx.get(f"{cluster.url}/metrics", timeout=30).text
    return set(re.findall(r'^vllm:num_requests_running{.*engine="(\w+)"', text, re.MULTILINE))


def test_health_answers_while_long_prompts_are_computed(cluster: ClusterProcess) -> None:
    """O21: real work is no reason to be taken for dead; compute never holds the replica's loop."""
    before = set(replicas(cluster))
    waits: list[float] = []

    async def run() -> None:
        it = AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=300, max_retries=0)
        async with it, httpx.AsyncClient(timeout=30) as watcher:
            prompts = [f"{i} " + "It goes on without an end. " * 200 for i in range(6)]
            work = asyncio.gather(
                *(it.completions.create(model=MODEL, prompt=p, max_tokens=1) for p in prompts)
            )
            while not work.done():
                begin = time.monotonic()
                answer = await watcher.get(f"{cluster.url}/health")
                waits.append(time.monotonic() - begin)
                assert answer.status_code == 200
                assert len(answer.json()["replicas"]) == REPLICAS, "each had time to answer"
                await asyncio.sleep(0.2)
            await work

    asyncio.run(run())
    print(f"{len(waits)} answers, median {statistics.median(waits):.3f} s, max {max(waits):.3f} s")
    assert len(waits) >= 5
    assert statistics.median(waits) < 0.5
    assert max(waits) < 3.0
    assert set(replicas(cluster)) == before, "a replica was restarted"


def test_a_replica_that_hangs_does_not_silence_the_others(cluster: ClusterProcess) -> None:
    pid = cluster.pids("ServeReplica:quire:Replica")[0]
    everyone = set(replicas(cluster))
    assert measured(cluster) == everyone
    os.kill(pid, signal.SIGSTOP)
    try:
        answering = set(replicas(cluster))
        assert len(answering) == REPLICAS - 1
        assert measured(cluster) == answering
    finally:
        os.kill(pid, signal.SIGCONT)
    assert set(replicas(cluster)) == everyone, "it was only slow"
