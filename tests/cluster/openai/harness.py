"""A front over a fake backend, and a client's view of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Mapping, MutableMapping
from typing import Any

import httpx
from starlette.applications import Starlette

from cluster.http import create_app
from cluster.openai.service import Backend, Limits, Service
from cluster.tokenizer import Tokenizer

VOCAB = 49152
MODEL = "smollm2"


async def _metrics() -> bytes:
    return b"vllm:num_requests_running 0\n"


async def _health() -> tuple[bool, Mapping[str, Any]]:
    return True, {"status": "ok"}


def make_service(tokenizer: Tokenizer, backend: Backend, **changes: Any) -> Service:
    """A service with SmolLM2's numbers; `changes` replace fields."""
    service = Service(
        model_names=(MODEL,),
        max_model_len=2048,
        kv_pool_tokens=4096,
        vocab_size=VOCAB,
        tokenizer=tokenizer,
        backend=backend,
        metrics=_metrics,
        health=_health,
        version="0.0",
        created=1_700_000_000,
        limits=Limits(receipt_wait_s=0.05),
    )
    return dataclasses.replace(service, **changes)


class Front:
    """Requests to one app, each from a fresh event loop."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.app = create_app(service)

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        return asyncio.run(self.send(method, path, **kwargs))

    async def send(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://quire") as client:
            return await client.request(method, path, **kwargs)

    def complete(self, **body: Any) -> dict[str, Any]:
        return self._ok("/v1/completions", body)

    def chat(self, **body: Any) -> dict[str, Any]:
        return self._ok("/v1/chat/completions", body)

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream that ends as it should."""
        response = self.request("POST", path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response.content)

    def refusal(self, path: str, body: Any) -> dict[str, Any]:
        """The error object of a request that gets a 400."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = self.request("POST", path, content=content)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)

    def _ok(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.request("POST", path, json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())


class RawClient:
    """One request straight into the app, by a client that can hang up."""

    def __init__(self, app: Starlette) -> None:
        self.status = 0
        self.parts: list[bytes] = []
        """Bodies of all writes so far."""
        self.times: list[float] = []
        """CPU seconds of the process at each of `parts`."""
        self.wrote = asyncio.Event()
        self.reads = asyncio.Event()
        """While it is cleared, writes wait."""
        self.reads.set()
        self._app = app
        self._gone = asyncio.Event()

    def hang_up(self) -> None:
        """The socket closes."""
        self._gone.set()

    async def post(self, path: str, body: dict[str, Any] | bytes) -> None:
        """Runs until the app has nothing more to do for this request."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        incoming = [{"type": "http.request", "body": content}]

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            await self.reads.wait()
            if message["type"] == "http.response.start":
                self.status = message["status"]
            else:
                self.parts.append(message["body"])
                self.times.append(time.process_time())
                self.wrote.set()

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [],
            "query_string": b"",
            "root_path": "",
        }
        await self._app(scope, receive, send)


def events(content: bytes) -> list[dict[str, Any]]:
    """The JSON of each event; checks the frame and the one [DONE] at the very end."""
    assert content.endswith(b"\n\n")
    frames = content.split(b"\n\n")[:-1]
    assert all(frame.startswith(b"data: ") and b"\n" not in frame for frame in frames)
    assert frames[-1] == b"data: [DONE]"
    assert frames.count(b"data: [DONE]") == 1
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames[:-1]]


def join_completion(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Choices of a completions stream, put together as a client would."""
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            one = joined.setdefault(
                choice["index"], {"text": "", "logprobs": None, "finish_reason": None}
            )
            assert one["finish_reason"] is None, "nothing comes after the finish reason"
            one["text"] += choice["text"]
            one["finish_reason"] = choice["finish_reason"]
            for key, values in (choice["logprobs"] or {}).items():
                one["logprobs"] = one["logprobs"] or {}
                one["logprobs"].setdefault(key, []).extend(values)
    return joined


def join_chat(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The same for chat; checks the order role, content, finish reason."""
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice["delta"]
            if index not in joined:
                assert delta == {"role": "assistant", "content": ""}
                joined[index] = {"text": "", "logprobs": None, "finish_reason": None}
            else:
                assert "role" not in delta
            one = joined[index]
            assert one["finish_reason"] is None, "nothing comes after the finish reason"
            one["text"] += delta.get("content", "")
            one["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"]:
                one["logprobs"] = (one["logprobs"] or []) + choice["logprobs"]["content"]
    return joined
