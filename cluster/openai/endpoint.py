"""The two endpoints that generate, as ASGI applications."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from cluster.openai.chunks import DONE, ChunkWriter, encode, error_event
from cluster.openai.client_headers import ClientHeaders
from cluster.openai.errors import ApiError, overloaded, server_error
from cluster.openai.generation import Generation
from cluster.openai.responses import Collected, full_response
from cluster.openai.runner import run
from cluster.openai.service import BackendError, QueueFull, Service
from cluster.openai.transport import read_body, until_disconnect

logger = logging.getLogger("quire.http")

Prepare = Callable[[bytes, ClientHeaders], Awaitable[Generation]]
"""A body and its headers -> a checked request."""

_JSON_HEADERS = [(b"content-type", b"application/json")]
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerateEndpoint:
    """Answers one kind of generating request. Raises ApiError before the response began."""

    def __init__(self, service: Service, prepare: Prepare) -> None:
        self._service = service
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = ClientHeaders.of(Headers(scope=scope))
        try:
            raw = await read_body(scope, receive, self._service.limits.max_body_bytes)
        except ClientDisconnect:
            return
        await until_disconnect(receive, self._answer(raw, headers, send))

    async def _answer(self, raw: bytes, headers: ClientHeaders, send: Send) -> None:
        generation = await self._prepare(raw, headers)
        respond = self._stream if generation.stream else self._whole
        try:
            await respond(generation, send)
        except BackendError as error:
            raise as_api_error(error) from error

    async def _whole(self, generation: Generation, send: Send) -> None:
        choices = [Collected() for _ in range(generation.n * len(generation.journals))]
        async with aclosing(run(self._service, generation.journals, receipts=True)) as batches:
            async for batch in batches:
                for index, update in batch:
                    choices[index].add(update)
        response = full_response(generation, choices, self._service.tokenizer)
        body = encode(response).encode("ascii")
        length = (b"content-length", str(len(body)).encode("ascii"))
        await _start(send, [*_JSON_HEADERS, length])
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, generation: Generation, send: Send) -> None:
        async with aclosing(self._events(generation)) as events:
            # What fails before anything came is a plain HTTP error.
            first = await anext(events)
            await _start(send, _STREAM_HEADERS)
            await _send_part(send, first)
            async for event in events:
                await _send_part(send, event)
            await _send_part(send, DONE)
            await send({"type": "http.response.body", "body": b""})

    async def _events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """One item for what came together; never an empty one. An error that ends them is the
        last, unless it is the first: then it is raised."""
        writer = ChunkWriter(generation, self._service.tokenizer)
        begun = False
        try:
            updates = run(self._service, generation.journals, receipts=generation.include_usage)
            async with aclosing(updates) as batches:
                async for batch in batches:
                    text = "".join([writer.write(index, update) for index, update in batch])
                    if text:
                        yield text.encode("ascii")
                        begun = True
        except BackendError as error:
            if not begun:
                raise
            yield error_event(as_api_error(error)).encode("ascii")
            return
        except Exception:
            if begun:
                yield error_event(server_error("internal error")).encode("ascii")
            raise
        if generation.include_usage:
            yield writer.usage().encode("ascii")


def as_api_error(error: BackendError) -> ApiError:
    """503 where trying again may help, else 500."""
    if isinstance(error, QueueFull):
        return overloaded(str(error), error.retry_after_s)
    logger.error("a request failed: %s", error)
    return server_error(str(error))


async def _start(send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
