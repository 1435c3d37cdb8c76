"""The two endpoints that generate, as ASGI applications."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from cluster.openai.chunks import DONE, ChunkWriter, encode, error_event
from cluster.openai.client_headers import ClientHeaders
from cluster.openai.deadline import Deadline
from cluster.openai.errors import ApiError, deadline_exceeded, overloaded, server_error
from cluster.openai.generation import Generation
from cluster.openai.responses import Collected, full_response
from cluster.openai.runner import run
from cluster.openai.service import BackendError, DeadlinePassed, QueueFull, Service
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
        limits = self._service.limits
        arrived_at = asyncio.get_running_loop().time()
        deadline = Deadline(arrived_at, limits.request_timeout_s, self._service.note_timeout)
        headers = ClientHeaders.of(Headers(scope=scope))
        try:
            raw = await read_body(scope, receive, limits.max_body_bytes)
        except ClientDisconnect:
            return
        await until_disconnect(receive, self._answer(raw, headers, deadline, send))

    async def _answer(
        self, raw: bytes, headers: ClientHeaders, deadline: Deadline, send: Send
    ) -> None:
        try:
            async with deadline.enforced():
                generation = await self._prepare(raw, headers)
            deadline.tighten(generation.timeout_s)
            respond = self._stream if generation.stream else self._whole
            await respond(generation, deadline, send)
        except BackendError as error:
            raise as_api_error(error) from error

    async def _whole(self, generation: Generation, deadline: Deadline, send: Send) -> None:
        choices = [Collected() for _ in range(generation.n * len(generation.journals))]
        updates = run(self._service, generation.journals, receipts=True)
        async with deadline.enforced(), aclosing(updates) as batches:
            async for batch in batches:
                for index, update in batch:
                    choices[index].add(update)
                if generation.finished:  # only receipts are still to come: that must not fail it
                    deadline.lift()
        response = full_response(generation, choices, self._service.tokenizer)
        body = encode(response).encode("ascii")
        length = (b"content-length", str(len(body)).encode("ascii"))
        await _start(send, [*_JSON_HEADERS, length])
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, generation: Generation, deadline: Deadline, send: Send) -> None:
        begun = False
        try:
            # Where `send` waits for a slow reader, the event that waits is lost with the deadline;
            # Serve's never waits.
            async with (
                deadline.enforced(),
                aclosing(self._events(generation, deadline)) as events,
            ):
                async for event in events:
                    if not begun:
                        await _start(send, _STREAM_HEADERS)
                        begun = True
                    await _send_part(send, event)
        except BackendError as error:
            # What fails before anything came is a plain HTTP error.
            if not begun:
                raise
            await _send_part(send, error_event(as_api_error(error)).encode("ascii"))
        except Exception:
            if begun:
                internal = server_error("internal error")
                await _send_part(send, error_event(internal).encode("ascii"))
            raise
        await _send_part(send, DONE)
        await send({"type": "http.response.body", "body": b""})

    async def _events(
        self, generation: Generation, deadline: Deadline
    ) -> AsyncGenerator[bytes, None]:
        """One item for what came together; never an empty one."""
        writer = ChunkWriter(generation, self._service.tokenizer)
        updates = run(self._service, generation.journals, receipts=generation.include_usage)
        async with aclosing(updates) as batches:
            async for batch in batches:
                if generation.finished:  # only receipts are still to come: that must not fail it
                    deadline.lift()
                text = "".join([writer.write(index, update) for index, update in batch])
                if text:
                    yield text.encode("ascii")
        if generation.include_usage:
            yield writer.usage().encode("ascii")


def as_api_error(error: BackendError) -> ApiError:
    """503 where trying again may help, 504 where there was no time left, else 500."""
    if isinstance(error, QueueFull):
        return overloaded(str(error), error.retry_after_s)
    if isinstance(error, DeadlinePassed):
        return deadline_exceeded(str(error), "timeout_s" if error.asked else None)
    logger.error("a request failed: %s", error)
    return server_error(str(error))


async def _start(send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
