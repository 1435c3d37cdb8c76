"""Requests that take longer than they may, on a clock that jumps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import httpx2
import openai
import pytest

from cluster.openai.client_headers import ClientHeaders
from cluster.openai.endpoint import GenerateEndpoint
from cluster.openai.errors import ApiError
from cluster.openai.generation import Generation
from cluster.tokenizer import Tokenizer
from tests.cluster.openai.fake_backend import FakeBackend
from tests.cluster.openai.harness import MODEL, RawClient, events
from tests.cluster.openai.slow_front import BODY, COMPLETIONS, OWN, SERVERS, Slow
from tests.cluster.virtual_clock import run_virtually

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_gets_what_there_is_and_then_the_error(
    tokenizer: Tokenizer, prompts: int, n: int
) -> None:
    slow = Slow(tokenizer)
    response = slow.post(**BODY | {"prompt": ["x"] * prompts}, n=n, stream=True, timeout_s=4.5)
    assert response.status_code == 200
    *chunks, last = events(response.content)
    assert last == {"error": OWN}
    texts = dict.fromkeys(range(prompts * n), "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert choice["finish_reason"] is None
            texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(prompts * n), tokenizer.decode([28] * 4))
    assert slow.ended_at == pytest.approx(4.5)
    assert slow.timeouts == 1, "a request, not a prompt, has a deadline"
    slow.assert_all_closed(prompts)


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_whole_answer_is_a_504(tokenizer: Tokenizer, prompts: int) -> None:
    slow = Slow(tokenizer)
    response = slow.post(**BODY | {"prompt": ["x"] * prompts}, n=2, timeout_s=4.5)
    assert (response.status_code, response.json()) == (504, {"error": OWN})
    assert response.headers["x-should-retry"] == "false"
    assert slow.ended_at == pytest.approx(4.5)
    assert slow.timeouts == 1
    slow.assert_all_closed(prompts)


def test_chat_has_deadlines_too(tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "timeout_s": 4.5}
    slow = Slow(tokenizer)
    assert slow.post(CHAT, **body).status_code == 504
    *chunks, last = events(slow.post(CHAT, **body, stream=True).content)
    assert (len(chunks), last) == (1 + 4, {"error": OWN})
    assert slow.timeouts == 2


def test_a_stream_to_which_nothing_came_is_a_504(tokenizer: Tokenizer) -> None:
    slow = Slow(tokenizer)
    response = slow.post(**BODY, stream=True, timeout_s=0.5)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    slow.assert_all_closed(1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("server", "client", "ends_at", "error"),
    [
        (4.5, None, 4.5, SERVERS),
        (4.5, 60, 4.5, SERVERS),
        (60.0, 4.5, 4.5, OWN),
        (None, 4.5, 4.5, OWN),
        (None, None, 20.0, None),
        (20.5, None, 20.0, None),
        (None, 1e300, 20.0, None),
    ],
)
def test_the_smaller_limit_counts(
    tokenizer: Tokenizer,
    stream: bool,
    server: float | None,
    client: float | None,
    ends_at: float,
    error: dict[str, Any] | None,
) -> None:
    slow = Slow(tokenizer, request_timeout_s=server)
    response = slow.post(prompt="x", max_tokens=20, timeout_s=client, stream=stream)
    assert slow.ended_at == pytest.approx(ends_at)
    assert slow.timeouts == (error is not None)
    last = events(response.content)[-1] if stream else response.json()
    if error is None:
        assert last["choices"][0]["finish_reason"] == "length"
    else:
        assert last == {"error": error}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_a_complete_answer_does_not_fail_for_its_receipts(
    tokenizer: Tokenizer, stream: bool, n: int
) -> None:
    """The text of the first choice is complete at 3 s, of the second one at 8 s, and no receipt
    comes."""
    backend = FakeBackend(
        lambda request, choice: [28] * (2 + 5 * choice) + [30] * 90,
        step_s=1.0,
        answers_abort=False,
    )
    slow = Slow(tokenizer, backend, receipt_wait_s=10.0)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = {"prompt": "x", "max_tokens": 90, "stop": tokenizer.decode([30]), "n": n}
    response = slow.post(**body, timeout_s=4.5, **options)
    last = events(response.content)[-1] if stream else response.json()
    assert slow.timeouts == (n == 2)
    if n == 1:
        assert last["usage"]["completion_tokens"] == 3
        assert slow.ended_at > 10.0
    else:
        assert last["error"]["code"] == "deadline_exceeded"
        assert slow.ended_at == pytest.approx(4.5)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("goes_at", [2.5, 4.5])
def test_who_hangs_up_before_or_at_the_deadline_ends_all_the_same(
    tokenizer: Tokenizer, stream: bool, goes_at: float
) -> None:
    slow = Slow(tokenizer)

    async def run() -> None:
        client = RawClient(slow.front.app)
        asyncio.get_running_loop().call_at(goes_at, client.hang_up)
        await client.post(COMPLETIONS, {**BODY, "stream": stream, "timeout_s": 4.5})
        assert asyncio.get_running_loop().time() == pytest.approx(goes_at)
        assert len(asyncio.all_tasks()) == 1

    run_virtually(run())
    slow.assert_all_closed(1)
    assert slow.timeouts == 0 or goes_at == 4.5


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("goes_at", [2.5, 4.5])
def test_a_cancellation_is_not_taken_for_the_deadline(
    tokenizer: Tokenizer, stream: bool, goes_at: float
) -> None:
    slow = Slow(tokenizer)

    async def run() -> None:
        body = {**BODY, "stream": stream, "timeout_s": 4.5}
        task = asyncio.create_task(RawClient(slow.front.app).post(COMPLETIONS, body))
        asyncio.get_running_loop().call_at(goes_at, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    run_virtually(run())
    slow.assert_all_closed(1)


def test_a_client_that_does_not_read_keeps_nothing_running(tokenizer: Tokenizer) -> None:
    slow = Slow(tokenizer)

    async def run() -> RawClient:
        client = RawClient(slow.front.app)
        body = {**BODY, "stream": True, "timeout_s": 4.5}
        task = asyncio.create_task(client.post(COMPLETIONS, body))
        await asyncio.sleep(2.5)
        client.reads.clear()
        await asyncio.sleep(2.1)
        slow.assert_all_closed(1)
        assert not task.done()
        client.reads.set()
        await task
        return client

    client = run_virtually(run())
    assert events(b"".join(client.parts))[-1] == {"error": OWN}


@pytest.mark.parametrize(("arrives_s", "checked_s"), [(0.0, 7.0), (4.0, 1.0), (9.0, 0.0)])
def test_time_counts_from_arrival_before_the_body_is_read_and_checked(
    tokenizer: Tokenizer, arrives_s: float, checked_s: float
) -> None:
    slow = Slow(tokenizer, request_timeout_s=4.5)

    async def prepare(raw: bytes, headers: ClientHeaders) -> Generation:
        await asyncio.sleep(checked_s)
        raise AssertionError("it should have been ended")

    incoming = [{"type": "http.request", "body": b"{}"}]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(arrives_s if incoming else 3600.0)
        return incoming.pop()

    async def send(message: Any) -> None:
        raise AssertionError("nothing is to be sent")

    async def run() -> None:
        with pytest.raises(ApiError) as caught:
            await GenerateEndpoint(slow.service, prepare)({"headers": []}, receive, send)
        assert (caught.value.status, caught.value.code) == (504, "deadline_exceeded")
        now = asyncio.get_running_loop().time()
        assert now == pytest.approx(max(4.5, arrives_s))

    run_virtually(run())
    assert slow.timeouts == 1


def test_what_is_late_before_it_begins_is_not_begun(tokenizer: Tokenizer) -> None:
    slow = Slow(tokenizer)

    async def late_body() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(5.0)
        yield json.dumps({**BODY, "timeout_s": 4.5}).encode()

    async def run() -> httpx.Response:
        return await slow.front.send("POST", COMPLETIONS, content=late_body())

    assert run_virtually(run()).status_code == 504
    assert slow.fake.requests == []


def test_the_official_client_is_told_and_does_not_try_again(tokenizer: Tokenizer) -> None:
    slow = Slow(tokenizer)

    async def run() -> None:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=slow.front.app))
        async with openai.AsyncOpenAI(
            api_key="none", base_url="http://quire/v1", max_retries=2, http_client=http
        ) as client:
            ask: Any = {"model": MODEL, **BODY, "extra_body": {"timeout_s": 4.5}}
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(**ask)
            assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
            assert len(slow.fake.requests) == 1
            stream = await client.completions.create(**ask, stream=True)
            with pytest.raises(openai.APIError, match=r"within its timeout_s of 4\.5 s"):
                async for _ in stream:
                    pass

    run_virtually(run())
