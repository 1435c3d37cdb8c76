"""The official client reads what we write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import openai
import pytest

from cluster.openai.service import BackendError
from cluster.tokenizer import Tokenizer
from tests.cluster.openai.fake_backend import FakeBackend
from tests.cluster.openai.harness import MODEL, Front, make_service

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
TEXTS = ["Hello, wörld", "Bye"]


def with_client(
    tokenizer: Tokenizer, use: Callable[[openai.AsyncOpenAI], Awaitable[None]], **options: Any
) -> None:
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    backend = FakeBackend(lambda request, choice: ids[choice % 2], **options)
    front = Front(make_service(tokenizer, backend))

    async def run() -> None:
        transport = httpx2.ASGITransport(app=front.app)
        async with openai.AsyncOpenAI(
            api_key="none",
            base_url="http://quire/v1",
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=transport),
        ) as client:
            await use(client)

    asyncio.run(run())


def test_completions(tokenizer: Tokenizer) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        whole = await client.completions.create(model=MODEL, prompt="x", n=2, logprobs=1)
        assert [choice.text for choice in whole.choices] == TEXTS
        assert whole.choices[0].logprobs is not None
        assert "".join(whole.choices[0].logprobs.tokens or []) == TEXTS[0]
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 5
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXTS[0]

    with_client(tokenizer, use)


@pytest.mark.parametrize("n", [1, 2])
def test_chat_stream_with_usage(tokenizer: Tokenizer, n: int) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            n=n,
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
        )
        texts = [""] * n
        reasons: list[list[str]] = [[] for _ in range(n)]
        last = None
        async for chunk in stream:
            last = chunk
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
        assert texts == TEXTS[:n]
        assert reasons == [["stop"]] * n
        assert last is not None
        assert last.choices == []
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=n)
        assert [choice.message.content for choice in whole.choices] == TEXTS[:n]
        assert last.usage == whole.usage

    with_client(tokenizer, use)


def test_models(tokenizer: Tokenizer) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "quire"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("some/other")

    with_client(tokenizer, use)


def test_errors(tokenizer: Tokenizer) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=MODEL, prompt="x", temperature=3)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="it broke"):
            async for _ in stream:
                pass

    with_client(tokenizer, use, error_after=2, error=BackendError("it broke"))
