"""The plain endpoints, and staying responsive while others ask for too much."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from cluster.tokenizer import Tokenizer
from tests.cluster.openai.fake_backend import FakeBackend, always
from tests.cluster.openai.harness import MODEL, Front, RawClient, make_service


@pytest.fixture
def front(tokenizer: Tokenizer) -> Front:
    return Front(make_service(tokenizer, FakeBackend(always([28] * 5))))


def test_models(tokenizer: Tokenizer) -> None:
    names = (MODEL, "org/alias")
    front = Front(make_service(tokenizer, FakeBackend(always([28])), model_names=names))
    listed = front.request("GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == list(names)
    for name, card in zip(names, listed["data"], strict=True):
        assert front.request("GET", f"/v1/models/{name}").json() == card
        assert (card["object"], card["max_model_len"]) == ("model", 2048)
        answer = front.complete(model=name, prompt="x")
        assert answer["model"] == name
    assert front.request("GET", "/v1/models/other").status_code == 404


def test_health(tokenizer: Tokenizer) -> None:
    async def ill() -> tuple[bool, Mapping[str, Any]]:
        return False, {"status": "no step for 12 s"}

    front = Front(make_service(tokenizer, FakeBackend(always([28]))))
    assert front.request("GET", "/health").status_code == 200
    front = Front(make_service(tokenizer, FakeBackend(always([28])), health=ill))
    response = front.request("GET", "/health")
    assert (response.status_code, response.json()) == (503, {"status": "no step for 12 s"})


def test_metrics_and_version(front: Front) -> None:
    metrics = front.request("GET", "/metrics")
    assert metrics.content == b"vllm:num_requests_running 0\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert front.request("GET", "/version").json() == {"version": "0.0"}


def test_unknown_paths_and_methods_are_errors_in_openais_shape(front: Front) -> None:
    for method, path, status in (("GET", "/v2", 404), ("GET", "/v1/completions", 405)):
        response = front.request(method, path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]


def test_tokenize_and_back(front: Front, tokenizer: Tokenizer) -> None:
    text = "Hello <|im_end|> wörld \U0001f336\ufe0f"
    body = {"prompt": text, "return_token_strs": True, "model": MODEL}
    answer = front.request("POST", "/tokenize", json=body).json()
    assert answer["tokens"] == tokenizer.encode(text, add_special_tokens=False)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    assert answer["token_strs"][0] == "Hello"
    back = front.request("POST", "/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a" * 500_000}, "prompt"),
        ("/tokenize", {"prompt": "a", "max_tokens": 5}, "max_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
    ],
)
def test_bad_tokenize(front: Front, path: str, body: dict[str, Any], param: str) -> None:
    assert front.refusal(path, body)["param"] == param


def test_lifespan(front: Front) -> None:
    async def run() -> list[str]:
        messages = [{"type": "lifespan.shutdown"}, {"type": "lifespan.startup"}]
        sent = []

        async def receive() -> Any:
            return messages.pop()

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await front.app({"type": "lifespan"}, receive, send)
        return sent

    assert asyncio.run(run()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def message(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


OVERSIZED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "5 MB chat": (413, CHAT, {"messages": [message("word " * 1_000_000)]}),
    "3 MB chat": (400, CHAT, {"messages": [message("word " * 600_000)]}),
    "1 MB without spaces": (400, COMPLETIONS, {"prompt": "x" * 1_000_000}),
    "as long as may be": (400, COMPLETIONS, {"prompt": "qxzj" * 160_000}),
    "20 000 messages": (400, CHAT, {"messages": [message("Hi")] * 20_000}),
    "long stop list": (400, COMPLETIONS, {"prompt": "x", "stop": ["y"] * 10_000}),
    "5 000 prompts": (400, COMPLETIONS, {"prompt": ["x"] * 5_000}),
    "too many token ids": (400, COMPLETIONS, {"prompt": [1000] * 300_000}),
    "too many lists of them": (400, COMPLETIONS, {"prompt": [[1000]] * 100_000}),
}


def test_everything_else_goes_on_while_oversized_requests_are_refused(
    tokenizer: Tokenizer,
) -> None:
    backend = FakeBackend(always([28] * 100_000), step_s=0.01)
    service = make_service(tokenizer, backend, max_model_len=8192, kv_pool_tokens=10**6)
    front = Front(service)
    bodies = {name: json.dumps(body).encode() for name, (_, _, body) in OVERSIZED.items()}
    clients = {name: RawClient(front.app) for name in OVERSIZED}

    async def poll(done: asyncio.Event) -> float:
        """CPU seconds that the process spent during the slowest round of probes: an upper
        bound of what a user waits on an idle machine, and blind to others' load on this one."""
        slowest = 0.0
        while not done.is_set():
            start = time.process_time()
            assert (await front.send("GET", "/health")).status_code == 200
            assert (await front.send("GET", "/metrics")).status_code == 200
            slowest = max(slowest, time.process_time() - start)
            await asyncio.sleep(0.02)
        return slowest

    async def run() -> None:
        stream = RawClient(front.app)
        body = {"prompt": "x", "max_tokens": 8000, "stream": True}
        streaming = asyncio.create_task(stream.post("/v1/completions", body))
        await stream.wrote.wait()
        done = asyncio.Event()
        polling = asyncio.create_task(poll(done))
        async with asyncio.TaskGroup() as group:
            for name, (_, path, _) in OVERSIZED.items():
                group.create_task(clients[name].post(path, bodies[name]))
        done.set()
        assert await polling < 1.0
        for name, (status, _, _) in OVERSIZED.items():
            assert clients[name].status == status, name
        assert not streaming.done()
        assert max(b - a for a, b in itertools.pairwise(stream.times)) < 1.0
        stream.hang_up()
        await streaming

    asyncio.run(run())
    assert len(backend.requests) == 1


def test_only_small_bodies_are_handled_on_the_event_loop(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Tokenizer.encode
    threads: list[str] = []

    def spy(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    for content in ("small", "large " * 1000):
        front.complete(prompt=content)
        front.chat(messages=[message(content)])
        front.request("POST", "/tokenize", json={"prompt": content})
    small, large = threads[:3], threads[3:]
    assert set(small) == {threading.main_thread().name}
    assert len(large) == 3
    assert all(name.startswith("quire-http") for name in large)
