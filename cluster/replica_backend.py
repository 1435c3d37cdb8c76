"""Sends requests to replicas: a Serve call for placement and life time, a listener for the
deltas."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.serve import context as serve_context
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from cluster.follower import Conditions, ReplicaLost
from cluster.openai.service import BackendError, QueueFull
from cluster.reply_listener import Inbox, ReplyListener
from replicas.protocol import Dispatch, FinishReason, GenerateRequest, TokenDelta
from replicas.reply_channel import IngressUnreachable

LAST_DELTA_GRACE_S = 10.0
"""The call of a request may return before its last frame has been read, but not by more."""


class ReplicaBackend:
    """A Dispatcher over a handle to the replicas."""

    def __init__(self, handle: DeploymentHandle[Any], listener: ReplyListener) -> None:
        self._handle = handle
        self._listener = listener
        self._calls: set[asyncio.Task[None]] = set()

    def attempt(self, request: GenerateRequest, conditions: Conditions) -> ReplicaAttempt:
        """Prepare a try; see Dispatcher."""
        return ReplicaAttempt(self, request, conditions)

    def open(self, request_id: str) -> Inbox:
        """Receive the deltas of a request from now on."""
        return self._listener.open(request_id)

    def close(self, request_id: str) -> None:
        """Receive no more deltas of a request."""
        self._listener.close(request_id)

    def abort(self, request_id: str, choice: int) -> None:
        """Tell the replica that serves the request to end one of its choices."""
        self._listener.abort(request_id, choice)

    def call(
        self, request: GenerateRequest, conditions: Conditions, inbox: Inbox
    ) -> asyncio.Task[None]:
        """Start the Serve call, which lasts as long as the request does; its failure goes to
        the inbox. Cancelling it is the request's cancellation."""
        call = asyncio.create_task(self._call(request, conditions, inbox))
        self._calls.add(call)  # the loop itself keeps only weak references to tasks
        call.add_done_callback(self._calls.discard)
        return call

    async def _call(self, request: GenerateRequest, conditions: Conditions, inbox: Inbox) -> None:
        # Calls made within one HTTP request share its internal id, and Serve's router would
        # take them for each other: an empty one makes Serve draw an id of the call's own.
        current = serve_context._get_serve_request_context()
        serve_context._serve_request_context.set(
            dataclasses.replace(current, _internal_request_id="")  # type: ignore[arg-type]
        )
        dispatch = Dispatch(self._listener.address, conditions.avoid, conditions.within_s)
        response = self._handle.generate.remote(request, dispatch)
        try:
            served = await response
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[no-untyped-call]
            raise
        except BackPressureError as error:
            inbox.fail(QueueFull(str(error)))
        except IngressUnreachable as error:
            message = f"the replica does not reach this ingress: {error.reason}"
            inbox.fail(ReplicaLost(message, error.replica))
        except Exception as error:  # noqa: BLE001 - whatever the replica died of
            inbox.fail(ReplicaLost(f"the replica failed: {error!r}", inbox.replica))
        else:
            if not served:
                inbox.decline()
                return
            lost = ReplicaLost(
                "the replica ended the request without its last tokens", inbox.replica
            )
            asyncio.get_running_loop().call_later(LAST_DELTA_GRACE_S, inbox.fail, lost)


class ReplicaAttempt:
    """One try at serving a request on one replica."""

    def __init__(
        self,
        backend: ReplicaBackend,
        request: GenerateRequest,
        conditions: Conditions,
    ) -> None:
        self.replica: str | None = None
        self.placement: str | None = None
        self._backend = backend
        self._request = request
        self._conditions = conditions

    async def deltas(self) -> AsyncGenerator[Sequence[TokenDelta], None]:
        """Deltas until every choice has ended; see Attempt."""
        request = self._request
        open_choices = set(range(request.n))
        open_choices -= {i for i, each in enumerate(request.progress) if each.finished}
        inbox = self._backend.open(request.request_id)
        call = self._backend.call(request, self._conditions, inbox)
        try:
            if not await self._is_accepted(inbox):
                return
            self.replica, self.placement = inbox.replica, inbox.placement
            while open_choices:
                deltas = await inbox.take()
                self._check(deltas)
                open_choices -= {delta.choice for delta in deltas if delta.finish_reason}
                yield deltas
        finally:
            if open_choices:
                call.cancel()
            self._backend.close(request.request_id)

    def abort(self, choice: int) -> None:
        """End one choice; its last delta comes from the replica like any other."""
        self._backend.abort(self._request.request_id, choice)

    async def _is_accepted(self, inbox: Inbox) -> bool:
        """False where no replica is as good as the one that has the request."""
        try:
            async with asyncio.timeout(self._conditions.patience_s):
                await inbox.wait()
            return not inbox.declined
        except TimeoutError:
            raise BackendError(
                f"the request lost its replica, and no other took it within "
                f"{self._conditions.patience_s:g} s"
            ) from None

    def _check(self, deltas: Sequence[TokenDelta]) -> None:
        # What one replica has served already is no bad request: if this one refuses it, as its
        # pool is smaller, say, another need not.
        served_before = bool(self._request.progress)
        for delta in deltas:
            failed = delta.replica_failed or served_before
            if delta.finish_reason is FinishReason.ERROR and failed:
                raise ReplicaLost(delta.error or "the replica failed", self.replica)
