"""The HTTP front: OpenAI's endpoints over one Service, as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.openai.client_headers import ClientHeaders
from cluster.openai.endpoint import GenerateEndpoint
from cluster.openai.errors import ApiError, model_not_found, server_error
from cluster.openai.generation import Generation, chat, completion
from cluster.openai.service import Service
from cluster.openai.tokenization import detokenize, tokenize
from cluster.openai.transport import read_body

T = TypeVar("T")
Checked = Callable[[bytes, Service, ClientHeaders], Generation]

_WORKERS = 2
_INLINE_BYTES = 2048
"""Bodies up to here take less time to check and tokenise than to hand to a thread."""


def create_app(service: Service) -> Starlette:
    """An application that serves `service`; it keeps no other state than its worker threads."""
    front = _Front(service)
    return Starlette(
        routes=[
            Route("/v1/completions", front.generating(completion), methods=["POST"]),
            Route("/v1/chat/completions", front.generating(chat), methods=["POST"]),
            Route("/v1/models", front.models),
            Route("/v1/models/{id:path}", front.model),
            Route("/tokenize", front.tokenize, methods=["POST"]),
            Route("/detokenize", front.detokenize, methods=["POST"]),
            Route("/health", front.health),
            Route("/metrics", front.metrics),
            Route("/version", front.version),
        ],
        middleware=[Middleware(EchoRequestId)],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_exception,
            ClientDisconnect: _client_gone,
            Exception: _unexpected,
        },
        lifespan=front.lifespan,
    )


class EchoRequestId:
    """Sends a client's X-Request-Id back with the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = scope["type"] == "http"
        request_id = ClientHeaders.of(Headers(scope=scope)).request_id if http else None
        if request_id is None:
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class _Front:
    """The endpoints, and the threads that check and tokenise what is not small.

    Their number bounds how much of the machine bad or huge requests can take; all others
    wait, while the event loop keeps serving streams, health and metrics.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._threads = ThreadPoolExecutor(_WORKERS, thread_name_prefix="quire-http")

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Ends the threads with the application."""
        yield
        self._threads.shutdown(wait=False, cancel_futures=True)

    def generating(self, check: Checked) -> GenerateEndpoint:
        """The endpoint of one kind of generating request."""

        async def prepare(raw: bytes, headers: ClientHeaders) -> Generation:
            return await self._off_loop(raw, lambda: check(raw, self._service, headers))

        return GenerateEndpoint(self._service, prepare)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        return await self._plain(request, tokenize)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        return await self._plain(request, detokenize)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        names = self._service.model_names
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        name = request.path_params["id"]
        if name not in self._service.model_names:
            raise model_not_found(name)
        return JSONResponse(self._card(name))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while steps are made, else 503."""
        healthy, details = await self._service.health()
        return JSONResponse(dict(details), 200 if healthy else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        text = await self._service.metrics()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": self._service.version})

    async def _plain(
        self, request: Request, answer: Callable[[bytes, Service], dict[str, Any]]
    ) -> Response:
        limit = self._service.limits.max_body_bytes
        raw = await read_body(request.scope, request.receive, limit)
        return JSONResponse(await self._off_loop(raw, lambda: answer(raw, self._service)))

    async def _off_loop(self, raw: bytes, work: Callable[[], T]) -> T:
        if len(raw) <= _INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "quire",
            "max_model_len": self._service.max_model_len,
        }


def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers)


def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    shaped = ApiError(error.status_code, message, "invalid_request_error", headers=error.headers)
    return _api_error(request, shaped)


def _client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


def _unexpected(request: Request, _error: Exception) -> Response:
    return _api_error(request, server_error("internal error"))
