"""Requests to replicas: a Serve call for placement and life time, a listener for the deltas."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.serve import context as serve_context
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from cluster.openai.service import BackendError, QueueFull
from cluster.reply_listener import Inbox, ReplyListener
from replicas.protocol import FinishReason, GenerateRequest, TokenDelta

logger = logging.getLogger(__name__)

LAST_DELTA_GRACE_S = 10.0
"""The call of a request may return before its last frame has been read, but not by more."""


class ReplicaBackend:
    """The HTTP layer's Backend over a handle to the replicas."""

    def __init__(
        self, handle: DeploymentHandle[Any], listener: ReplyListener, max_requests: int
    ) -> None:
        self._handle = handle
        self._listener = listener
        self._max_requests = max_requests
        self._num_open = 0
        self._calls: set[asyncio.Task[None]] = set()

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Sequence[TokenDelta], None]:
        """Deltas of all choices as they come; closing the iterator aborts what still runs.

        Raises:
            QueueFull: as many requests as allowed are in work already.
            BackendError: the replica died, or its connection did.
        """
        if self._num_open >= self._max_requests:
            raise QueueFull(f"{self._max_requests} requests are in work already")
        inbox = self._listener.open(request.request_id)
        self._num_open += 1
        open_choices = set(range(request.n))
        call = asyncio.create_task(self._call(request, inbox))
        self._calls.add(call)  # the loop itself keeps only weak references to tasks
        call.add_done_callback(self._calls.discard)
        try:
            while open_choices:
                deltas = await inbox.take()
                open_choices -= _ended(deltas, request.n)
                yield deltas
        finally:
            if open_choices:
                call.cancel()
            self._num_open -= 1
            self._listener.close(request.request_id)

    def abort(self, request_id: str, choice: int) -> None:
        """End one choice; its last delta comes from the replica like any other."""
        self._listener.abort(request_id, choice)

    async def _call(self, request: GenerateRequest, inbox: Inbox) -> None:
        # Calls made within one HTTP request share its internal id, and Serve's router would
        # take them for each other: an empty one makes Serve draw an id of the call's own.
        current = serve_context._get_serve_request_context()
        serve_context._serve_request_context.set(
            dataclasses.replace(current, _internal_request_id="")  # type: ignore[arg-type]
        )
        response = self._handle.generate.remote(request, self._listener.address)
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[no-untyped-call]
            raise
        except BackPressureError as error:
            inbox.fail(QueueFull(str(error)))
        except Exception as error:  # whatever the replica died of ends this request, not us
            logger.exception("request %s failed", request.request_id)
            inbox.fail(BackendError(f"the replica failed: {type(error).__name__}"))
        else:
            lost = BackendError("the replica ended the request without its last tokens")
            asyncio.get_running_loop().call_later(LAST_DELTA_GRACE_S, inbox.fail, lost)


def _ended(deltas: Sequence[TokenDelta], choices: int) -> set[int]:
    if any(delta.finish_reason is FinishReason.ERROR for delta in deltas):
        return set(range(choices))
    return {delta.choice for delta in deltas if delta.finish_reason is not None}
