"""The real cluster: streams, disconnects, batches, metrics; and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.cluster_process import MODEL, ClusterProcess
from tests.e2e.conftest import REPLICAS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

IDLE_S = 10.0
STREAMS = 16
LATE_S = 5.0
"""A deadline that leaves time for a first token."""


def client(cluster: ClusterProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=300, max_retries=0)


def snapshots(cluster: ClusterProcess) -> dict[str, dict[str, Any]]:
    replicas: dict[str, dict[str, Any]] = httpx.get(f"{cluster.url}/health").json()["replicas"]
    return replicas


def counter(cluster: ClusterProcess, name: str) -> float:
    """Sum over replicas."""
    text = httpx.get(f"{cluster.url}/metrics").text
    return sum(
        float(v) for v in re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    )


def assert_idle(cluster: ClusterProcess) -> None:
    """Within seconds nothing runs, waits or holds a block, on all replicas."""
    deadline = time.monotonic() + IDLE_S
    while True:
        found = snapshots(cluster)
        busy = [s for s in found.values() if s["running"] or s["waiting"] or s["used_blocks"]]
        if len(found) == REPLICAS and not busy:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


def assert_at_rest(cluster: ClusterProcess) -> None:
    """Within seconds a whole second goes by without a token, and nothing is held after it.

    Being idle once is not enough: a request that its client gave up while it was on its way to a
    replica still arrives there, and is aborted then.
    """
    deadline = time.monotonic() + IDLE_S
    before, generated = -1.0, counter(cluster, "vllm:generation_tokens_total")
    while generated != before:
        assert time.monotonic() < deadline, f"{before:.0f} tokens, then {generated:.0f}"
        time.sleep(1.0)
        before, generated = generated, counter(cluster, "vllm:generation_tokens_total")
    assert_idle(cluster)


async def stream_text(it: AsyncOpenAI, prompt: str, max_tokens: int) -> str:
    stream = await it.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True
    )
    return "".join([c.choices[0].text async for c in stream])


def test_a_chat_streams_to_the_official_client(cluster: ClusterProcess) -> None:
    it = OpenAI(base_url=f"{cluster.url}/v1", api_key="none")
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    settings: Any = {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = it.chat.completions.create(**settings)
    chunks = list(it.chat.completions.create(**settings, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 24


def test_sixteen_streams_at_once_on_all_replicas(cluster: ClusterProcess) -> None:
    prompts = [f"Number {i} is followed by number" for i in range(STREAMS)]

    async def run() -> list[str]:
        async with client(cluster) as it:
            return await asyncio.gather(*(stream_text(it, p, 12) for p in prompts))

    before = snapshots(cluster)
    together = asyncio.run(run())
    assert all(together)
    text = httpx.get(f"{cluster.url}/metrics").text
    served = re.findall(
        r'request_success_total{engine="(\w+)",finished_reason="length"\S* (\S+)', text
    )
    assert {engine for engine, count in served if float(count) >= 2} == set(before)
    assert_idle(cluster)

    async def alone() -> str:
        async with client(cluster) as it:
            return await stream_text(it, prompts[3], 12)

    assert asyncio.run(alone()) == together[3]


def test_choices_and_batches_come_complete_and_in_order(cluster: ClusterProcess) -> None:
    """Siblings of one HTTP request must not be taken for each other on their way."""
    it = OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=120)
    four = it.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say something."}],
        n=4,
        seed=7,
        max_tokens=8,
    )
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in four.choices}) > 1
    batch = it.completions.create(
        model=MODEL, prompt=[f"{i} plus one is" for i in range(16)], max_tokens=4, temperature=0
    )
    assert [choice.index for choice in batch.choices] == list(range(16))
    lone = it.completions.create(model=MODEL, prompt="5 plus one is", max_tokens=4, temperature=0)
    assert batch.choices[5].text == lone.choices[0].text
    assert_idle(cluster)


def test_a_seed_gives_the_same_text_on_either_replica(cluster: ClusterProcess) -> None:
    it = OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=120)
    texts = set()
    for _ in range(4):  # which of the replicas, is not fixed
        answer = it.completions.create(
            model=MODEL, prompt="Once", seed=11, max_tokens=12, temperature=1.0
        )
        texts.add(answer.choices[0].text)
    assert len(texts) == 1


def test_a_prefix_is_found_again(cluster: ClusterProcess) -> None:
    it = OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=120)
    prefix = "The quick brown fox jumps over the lazy dog. " * 12
    cached = []
    for i in range(3):
        answer = it.completions.create(model=MODEL, prompt=f"{prefix} {i}", max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert all(count is not None and count >= 96 for count in cached[1:])


def test_who_disconnects_leaves_nothing_running(cluster: ClusterProcess) -> None:
    async def leave_after(it: AsyncOpenAI, i: int, tokens: int) -> None:
        stream = await it.completions.create(
            model=MODEL,
            prompt=f"Story {i}:",
            max_tokens=900,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        seen = 0
        async for _ in stream:
            seen += 1
            if seen >= tokens:
                break
        await stream.close()

    async def run() -> None:
        async with client(cluster) as it:
            leaving = [leave_after(it, i, 1 + i % 3) for i in range(8)]
            staying = [stream_text(it, f"Tale {i}:", 12) for i in range(4)]
            results = await asyncio.gather(*leaving, *staying)
            assert all(results[8:])

    asyncio.run(run())
    assert_idle(cluster)


def test_bursts_of_requests_cancelled_at_once_do_not_run_on(cluster: ClusterProcess) -> None:
    rng = random.Random(5)

    async def give_up(it: httpx.AsyncClient, i: int) -> None:
        body = {"model": MODEL, "prompt": f"Burst {i}", "max_tokens": 900, "stream": i % 2 == 0}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.0, 0.1)):
                await it.post(f"{cluster.url}/v1/completions", json=body | {"ignore_eos": True})

    async def run() -> None:
        for burst in range(3):
            async with httpx.AsyncClient(timeout=60) as it:
                await asyncio.gather(*(give_up(it, 40 * burst + i) for i in range(40)))

    asyncio.run(run())
    assert_at_rest(cluster)


def timeouts(cluster: ClusterProcess) -> float:
    """Requests that their deadline has ended."""
    text = httpx.get(f"{cluster.url}/metrics").text
    (count,) = re.findall(r"^quire:request_timeouts_total (\S+)$", text, re.MULTILINE)
    return float(count)


def test_a_deadline_ends_its_request_and_no_other(cluster: ClusterProcess) -> None:
    prompts = [f"Fable {i}:" for i in range(4)]
    before = timeouts(cluster)

    async def runs_out(it: httpx.AsyncClient, i: int, **body: Any) -> tuple[httpx.Response, float]:
        body |= {"model": MODEL, "prompt": f"Saga {i}:", "max_tokens": 900, "ignore_eos": True}
        begin = time.monotonic()
        answer = await it.post(f"{cluster.url}/v1/completions", json=body | {"timeout_s": LATE_S})
        return answer, time.monotonic() - begin

    async def run() -> tuple[list[tuple[httpx.Response, float]], list[str]]:
        async with client(cluster) as it, httpx.AsyncClient(timeout=60) as raw:
            leaving = asyncio.gather(
                runs_out(raw, 0, stream=True),
                runs_out(raw, 1, stream=True, n=2),
                runs_out(raw, 2),
            )
            staying = asyncio.gather(*(stream_text(it, prompt, 48) for prompt in prompts))
            return await leaving, await staying

    ended, told = asyncio.run(run())
    assert_idle(cluster)
    assert timeouts(cluster) == before + 3
    for answer, seconds in ended:
        assert LATE_S <= seconds < LATE_S + 3.0
        streamed = answer.headers["content-type"].startswith("text/event-stream")
        assert answer.status_code == (200 if streamed else 504)
        last = answer.text
        if streamed:
            *chunks, last, done, rest = answer.text.split("\n\n")
            assert chunks
            assert (done, rest) == ("data: [DONE]", "")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert {answer.status_code for answer, _ in ended} == {200, 504}

    async def alone() -> str:
        async with client(cluster) as it:
            return await stream_text(it, prompts[0], 48)

    assert asyncio.run(alone()) == told[0]


def test_a_full_queue_says_when_to_come_back(cluster: ClusterProcess) -> None:
    async def run() -> list[httpx.Response]:
        body = {"model": MODEL, "prompt": "Wait", "max_tokens": 48, "ignore_eos": True}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as it:
            return await asyncio.gather(
                *(it.post(f"{cluster.url}/v1/completions", json=body) for _ in range(80))
            )

    answers = asyncio.run(run())
    refused = [answer for answer in answers if answer.status_code == 503]
    assert {answer.status_code for answer in answers} == {200, 503}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert all("error" in answer.json() for answer in refused)
    assert_idle(cluster)


def test_metrics_bear_the_names_that_dashboards_read(cluster: ClusterProcess) -> None:
    text = httpx.get(f"{cluster.url}/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:iteration_tokens_total_bucket",
        "vllm:request_num_preemptions_bucket",
    ):
        engines = set(re.findall(rf'^{name}{{.*engine="(\w+)"', text, re.MULTILINE))
        assert len(engines) == REPLICAS, name
    for name in (
        "quire:placements_total",
        "quire:stale_placements_total",
        "quire:placement_seconds_bucket",
        "quire:prefix_index_blocks",
        "quire:prefix_index_refused_blocks_total",
        "quire:router_replicas",
        "quire:feed_gaps_total",
        "quire:failovers_total",
        "quire:moves_total",
        "quire:request_timeouts_total",
    ):
        assert re.search(rf"^{name}[ {{]", text, re.MULTILINE), name
    assert text.count("# TYPE vllm:num_preemptions_total") == 1
