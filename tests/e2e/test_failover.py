"""Replicas that go while streams run on them: no client notices more than a pause."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.e2e.cluster_process import MODEL, ClusterProcess
from tests.e2e.conftest import REPLICAS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STREAMS = 27
"""Nine a replica."""
MAX_TOKENS = 72
DELIVERED = 8
"""Tokens that each stream has got when the replica goes."""
PAUSE_S = 10.0
"""Far above what an idle machine needs (see README): tests may share theirs."""


@dataclass
class Seen:
    """What one client got."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)
    """When each chunk came, seconds."""
    receipt: dict[str, Any] = field(default_factory=dict)

    @property
    def fewest(self) -> int:
        """Tokens of the choice that has the fewest."""
        return min((len(ids) for ids in self.token_ids.values()), default=0)


def settings(number: int, stops: Sequence[str]) -> dict[str, Any]:
    """Every kind of state that a choice can carry, in turn."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": number},
        {"temperature": 0.8, "seed": number, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"temperature": 0, "stop": list(stops)},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.9, "seed": number, "n": 2},
    ]
    return kinds[kind_of(number)]


def kind_of(number: int) -> int:
    """Three of a kind in a row: one for each replica, as the load of all is alike."""
    return number // REPLICAS % 6


async def follow(url: str, number: int, stops: Sequence[str], seen: Seen) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0) as it:
        stream = await it.completions.create(
            model=MODEL,
            prompt=f"Tale {number} of the fox and the hare. One day in spring",
            max_tokens=MAX_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "return_token_ids": True},
            **settings(number, stops),
        )
        async for chunk in stream:
            seen.arrivals.append(time.monotonic())
            if chunk.usage is not None:
                seen.receipt = chunk.usage.to_dict()["quire"]  # type: ignore[assignment]
            for choice in chunk.choices:
                note(seen, choice)


def note(seen: Seen, choice: Any) -> None:
    index = choice.index
    seen.token_ids.setdefault(index, []).extend(choice.token_ids or ())
    seen.text[index] = seen.text.get(index, "") + choice.text
    if choice.logprobs is not None:
        seen.logprobs += choice.logprobs.token_logprobs
    if choice.finish_reason is not None:
        seen.reasons[index] = choice.finish_reason


async def all_streams(
    cluster: ClusterProcess, stops: dict[int, Sequence[str]], kill: bool
) -> tuple[list[Seen], float]:
    """All clients at once; with `kill` a replica goes once each has `DELIVERED` tokens. Gives
    what they saw, and when that was."""
    everyone = [Seen() for _ in range(STREAMS)]
    tasks = [
        asyncio.create_task(follow(cluster.url, number, stops.get(number, ()), seen))
        for number, seen in enumerate(everyone)
    ]
    killed_at = 0.0
    if kill:
        while min(seen.fewest for seen in everyone) < DELIVERED:
            assert not any(task.done() for task in tasks), "they were to be running yet"
            await asyncio.sleep(0.01)
        assert max(seen.fewest for seen in everyone) <= MAX_TOKENS - 32
        pid = cluster.pids("ServeReplica:quire:Replica")[0]
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*tasks)
    if kill:
        assert pid not in cluster.pids("ServeReplica:quire:Replica")
    return everyone, killed_at


def late_words(seen: Seen) -> list[str]:
    """A string that the text has near its end only: to stop there."""
    text = seen.text[0]
    for start in range(len(text) * 3 // 4, len(text) - 8):
        if text.index(text[start : start + 6]) == start:
            return [text[start : start + 6]]
    raise AssertionError(f"nothing but repetition: {text!r}")


def test_a_killed_replica_takes_nothing_with_it(cluster: ClusterProcess) -> None:
    free, _ = asyncio.run(all_streams(cluster, {}, kill=False))
    stops = {number: late_words(seen) for number, seen in enumerate(free) if kind_of(number) == 3}
    quiet, _ = asyncio.run(all_streams(cluster, stops, kill=False))
    assert all(quiet[number].reasons == {0: "stop"} for number in stops)
    assert all(seen.receipt["failovers"] == 0 for seen in quiet)

    disturbed, killed_at = asyncio.run(all_streams(cluster, stops, kill=True))
    moved = [number for number, seen in enumerate(disturbed) if seen.receipt["failovers"]]
    assert len(moved) >= 8
    assert len({kind_of(number) for number in moved}) >= 5
    for before, after in zip(quiet, disturbed, strict=True):
        assert after.token_ids == before.token_ids
        assert after.text == before.text
        assert after.reasons == before.reasons
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-3)
    pauses = [min(t for t in disturbed[i].arrivals if t > killed_at) - killed_at for i in moved]
    print(f"{len(moved)} streams moved, the next token after {max(pauses):.2f} s at the latest")
    assert max(pauses) < PAUSE_S
    cluster.wait_replicas(REPLICAS)  # the tests to come expect them all
