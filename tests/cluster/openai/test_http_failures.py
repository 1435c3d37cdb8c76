"""Clients that hang up, backends that fail or are full."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from cluster.openai.service import BackendError, Limits, QueueFull
from cluster.tokenizer import Tokenizer
from replicas.protocol import FinishReason, GenerateRequest, TokenDelta
from tests.cluster.openai.fake_backend import FakeBackend, always
from tests.cluster.openai.harness import Front, RawClient, events, make_service

COMPLETIONS = "/v1/completions"
LONG = [28] * 5000
BODY = {"prompt": "x", "max_tokens": 1500}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("step_s", [0.001, 3600.0])
def test_a_client_that_hangs_up_ends_its_request(
    tokenizer: Tokenizer, stream: bool, prompts: int, step_s: float
) -> None:
    backend = FakeBackend(always(LONG), step_s=step_s)
    front = Front(make_service(tokenizer, backend))

    async def run() -> None:
        client = RawClient(front.app)
        body = {**BODY, "prompt": ["x"] * prompts, "stream": stream}
        task = asyncio.create_task(client.post(COMPLETIONS, body))
        await backend.until(lambda: len(backend.requests) == prompts)
        if step_s < 1:
            await backend.until(lambda: backend.steps > 5)
        assert not backend.closed
        client.hang_up()
        await asyncio.wait_for(task, 5)
        assert sorted(backend.closed) == sorted(r.request_id for r in backend.requests)
        steps = backend.steps
        await asyncio.sleep(0.01)
        assert backend.steps == steps
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
def test_cancellation_reaches_the_backend_and_is_not_swallowed(
    tokenizer: Tokenizer, stream: bool
) -> None:
    backend = FakeBackend(always(LONG), step_s=0.001)
    front = Front(make_service(tokenizer, backend))

    async def run() -> None:
        task = asyncio.create_task(
            RawClient(front.app).post(COMPLETIONS, {**BODY, "stream": stream})
        )
        await backend.until(lambda: backend.steps > 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(backend.closed) == 1
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompts", [1, 2])
def test_a_full_queue_is_503(tokenizer: Tokenizer, stream: bool, prompts: int) -> None:
    full = QueueFull("all 8 places in the queue are taken", retry_after_s=2.5)
    backend = FakeBackend(always(LONG), error_after=0, error=full)
    front = Front(make_service(tokenizer, backend))
    body = {**BODY, "prompt": ["x"] * prompts, "stream": stream}
    response = front.request("POST", COMPLETIONS, json=body)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    error = response.json()["error"]
    assert (error["code"], error["message"]) == ("overloaded", str(full))
    assert len(backend.closed) == prompts


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("error", [None, BackendError("it broke")])
def test_failure_before_anything_came_is_500(
    tokenizer: Tokenizer, stream: bool, error: BackendError | None
) -> None:
    backend = FakeBackend(always(LONG), error_after=0, error=error)
    front = Front(make_service(tokenizer, backend))
    response = front.request("POST", COMPLETIONS, json={**BODY, "stream": stream})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "it broke"
    assert len(backend.closed) == 1


@pytest.mark.parametrize("error", [None, BackendError("it broke"), QueueFull("it broke")])
@pytest.mark.parametrize("prompts", [1, 2])
def test_failure_in_mid_stream_is_an_event(
    tokenizer: Tokenizer, error: BackendError | None, prompts: int
) -> None:
    backend = FakeBackend(always(LONG), error_after=3, error=error)
    front = Front(make_service(tokenizer, backend))
    body = {**BODY, "prompt": ["x"] * prompts}
    *chunks, last = front.stream(COMPLETIONS, **body)
    assert len(chunks) >= 3 * prompts
    assert set(last) == {"error"}
    assert last["error"]["message"] == "it broke"
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert len(backend.closed) == prompts


def test_a_fault_of_ours_says_nothing_of_itself(tokenizer: Tokenizer) -> None:
    secret = ZeroDivisionError("secret")
    front = Front(make_service(tokenizer, FakeBackend(always(LONG), error_after=0, error=secret)))
    response = front.request("POST", COMPLETIONS, json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"

    front = Front(make_service(tokenizer, FakeBackend(always(LONG), error_after=2, error=secret)))
    response = front.request("POST", COMPLETIONS, json={**BODY, "stream": True})
    *_, last = response.content.strip().split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "internal error"


class EndsEarly:
    """A replica that goes away, or aborts what nobody asked it to."""

    def __init__(self, *deltas: TokenDelta) -> None:
        self._deltas = deltas

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Sequence[TokenDelta]]:
        for delta in self._deltas:
            yield [delta]

    def abort(self, request_id: str, choice: int) -> None:
        raise AssertionError("nothing to abort")


@pytest.mark.parametrize(
    "deltas", [(), (TokenDelta("r", 0, (28,), finish_reason=FinishReason.ABORT),)]
)
def test_a_request_that_is_cut_off_is_not_taken_for_finished(
    tokenizer: Tokenizer, deltas: tuple[TokenDelta, ...]
) -> None:
    backend: Any = EndsEarly(TokenDelta("r", 0, (28,)), *deltas)
    front = Front(make_service(tokenizer, backend))
    assert front.request("POST", COMPLETIONS, json=BODY).status_code == 500
    *_, last = front.stream(COMPLETIONS, **BODY)
    assert "error" in last


def test_a_backend_that_does_not_answer_an_abort_delays_but_does_not_hang(
    tokenizer: Tokenizer,
) -> None:
    backend = FakeBackend(always([28] * 100), answers_abort=False)
    front = Front(make_service(tokenizer, backend))
    body = {"prompt": "x", "max_tokens": 90, "stop": tokenizer.decode([28] * 3)}
    assert front.complete(**body)["usage"]["completion_tokens"] == 3
    options = {"include_usage": True}
    *_, last = front.stream(COMPLETIONS, **body, stream_options=options)
    assert last["usage"]["completion_tokens"] == 3
    assert len(backend.closed) == 2


@pytest.mark.parametrize("include_usage", [False, True])
def test_only_usage_waits_for_receipts(tokenizer: Tokenizer, include_usage: bool) -> None:
    backend = FakeBackend(always([28] * 100), answers_abort=False)
    limits = Limits(receipt_wait_s=3600)
    front = Front(make_service(tokenizer, backend, limits=limits))

    async def run() -> None:
        client = RawClient(front.app)
        body = {"prompt": "x", "max_tokens": 90, "stop": tokenizer.decode([28]), "stream": True}
        options = {"include_usage": include_usage}
        task = asyncio.create_task(client.post(COMPLETIONS, {**body, "stream_options": options}))
        await client.wrote.wait()
        assert b'"finish_reason":"stop"' in client.parts[0]
        if include_usage:
            done, _ = await asyncio.wait([task], timeout=0.05)
            assert not done
            client.hang_up()
        await asyncio.wait_for(task, 5)
        assert len(backend.closed) == 1

    asyncio.run(run())


def test_events_of_concurrent_streams_do_not_mix(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(lambda request, choice: [request.prompt_token_ids[0]] * 20, step_s=0.001)
    front = Front(make_service(tokenizer, backend))

    async def one(token_id: int) -> None:
        body = {"prompt": [token_id], "max_tokens": 20, "stream": True}
        response = await front.send("POST", COMPLETIONS, json=body)
        text = "".join(chunk["choices"][0]["text"] for chunk in events(response.content))
        assert text == tokenizer.decode([token_id] * 20)

    async def run() -> None:
        await asyncio.gather(*(one(1000 + i) for i in range(32)))

    asyncio.run(run())


def test_request_ids(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(always([28]))
    front = Front(make_service(tokenizer, backend))
    header = {"X-Request-Id": "from-header"}
    plain = front.request("POST", COMPLETIONS, json={"prompt": "x"})
    assert "x-request-id" not in plain.headers
    assert plain.json()["id"].startswith("cmpl-")
    echoed = front.request("POST", COMPLETIONS, json={"prompt": "x"}, headers=header)
    assert echoed.headers["x-request-id"] == "from-header"
    assert echoed.json()["id"] == "cmpl-from-header"
    body = {"prompt": "x", "request_id": "from-body"}
    for _ in range(2):
        again = front.request("POST", COMPLETIONS, json=body, headers=header)
        assert again.json()["id"] == "cmpl-from-body"
    refused = front.request("POST", COMPLETIONS, json={"prompt": 5}, headers=header)
    assert refused.headers["x-request-id"] == "from-header"
    header = {"X-Request-Id": "two words"}
    unfit = front.request("POST", COMPLETIONS, json={"prompt": "x"}, headers=header)
    assert "x-request-id" not in unfit.headers
    # One id twice from a client is never one id twice in the engine.
    assert len({request.request_id for request in backend.requests}) == len(backend.requests)
