"""One attempt: a Serve call, and deltas that come around it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import aclosing
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from ray.serve import context as serve_context
from ray.serve.exceptions import BackPressureError

from cluster.failover import FailoverBackend
from cluster.follower import Conditions, FollowLimits, ReplicaLost
from cluster.openai.service import BackendError, QueueFull
from cluster.replica_backend import LAST_DELTA_GRACE_S, ReplicaAttempt, ReplicaBackend
from cluster.reply_listener import ReplyListener
from replicas.core.sampling_params import SamplingParams
from replicas.protocol import Dispatch, FinishReason, GenerateRequest, Receipt, TokenDelta
from replicas.reply_channel import IngressUnreachable, ReplyChannels
from tests.cluster.virtual_clock import run_virtually

TIMEOUT_S = 2 * LAST_DELTA_GRACE_S
REQUEST = GenerateRequest("one", (1, 2, 3), SamplingParams(max_tokens=3, seed=1))


class Call:
    """What a handle's `remote` gives: a future that can be cancelled."""

    def __init__(self, request: GenerateRequest, dispatch: Dispatch) -> None:
        self.request = request
        self.dispatch = dispatch
        self.internal_id = serve_context._get_serve_request_context()._internal_request_id
        self.cancelled = asyncio.Event()
        self.future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def __await__(self) -> Generator[Any, None, bool]:
        return self.future.__await__()

    def cancel(self) -> None:
        self.cancelled.set()


class Handle:
    """A deployment handle as far as the backend uses it."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[Call] = asyncio.Queue()
        self.generate = self

    def remote(self, request: GenerateRequest, dispatch: Dispatch) -> Call:
        call = Call(request, dispatch)
        self.calls.put_nowait(call)
        return call


class Scene:
    """A backend, and the replica's side of the connection."""

    def __init__(self, listener: ReplyListener) -> None:
        self.handle = Handle()
        self.listener = listener
        self.backend = ReplicaBackend(self.handle, listener)  # type: ignore[arg-type]
        self.channels = ReplyChannels("replica", lambda *_: None, lambda _: None)

    def attempt(self, **conditions: Any) -> ReplicaAttempt:
        return self.backend.attempt(REQUEST, Conditions(**conditions))

    async def collect(self, attempt: ReplicaAttempt) -> list[TokenDelta]:
        async with aclosing(attempt.deltas()) as stream:
            return [delta async for deltas in stream for delta in deltas]


def run(
    scenario: Callable[[Scene], Awaitable[None]],
    how: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run,
) -> None:
    async def main() -> None:
        listener = ReplyListener("127.0.0.1")
        await listener.start()
        async with asyncio.timeout(TIMEOUT_S):
            await scenario(Scene(listener))
        await listener.stop()

    how(main())


def delta(token: int, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta("one", 0, (token,), finish_reason=finish)


def test_deltas_come_until_the_last_choice_has_ended() -> None:
    async def scenario(scene: Scene) -> None:
        attempt = scene.attempt(avoid=frozenset(("bad",)))
        task = asyncio.create_task(scene.collect(attempt))
        call = await scene.handle.calls.get()
        assert call.dispatch.avoid == {"bad"}
        channel = await scene.channels.get(call.dispatch.reply_to)
        channel.accept("one", '{"chosen": "replica"}')
        channel.send([delta(7)])
        channel.send([delta(8, FinishReason.LENGTH)])
        assert [d.token_ids for d in await task] == [(7,), (8,)]
        assert (attempt.replica, attempt.placement) == ("replica", '{"chosen": "replica"}')
        call.future.set_result(True)

    run(scenario)


def test_closing_early_cancels_the_call() -> None:
    async def scenario(scene: Scene) -> None:
        stream = scene.attempt().deltas()
        first = asyncio.create_task(anext(stream))
        call = await scene.handle.calls.get()
        channel = await scene.channels.get(call.dispatch.reply_to)
        channel.accept("one", None)
        channel.send([delta(7)])
        await first
        await stream.aclose()
        await call.cancelled.wait()

    run(scenario)


@pytest.mark.parametrize("patience_s", [None, 60.0])
def test_giving_up_before_a_replica_took_it_cancels_the_call(patience_s: float | None) -> None:
    async def scenario(scene: Scene) -> None:
        task = asyncio.create_task(scene.collect(scene.attempt(patience_s=patience_s)))
        call = await scene.handle.calls.get()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await call.cancelled.wait()

    run(scenario)


def test_an_attempt_that_nobody_would_serve_better_ends_without_deltas() -> None:
    async def scenario(scene: Scene) -> None:
        task = asyncio.create_task(scene.collect(scene.attempt(within_s=2.0)))
        call = await scene.handle.calls.get()
        assert call.dispatch.within_s == 2.0
        call.future.set_result(False)
        assert await task == []

    run(scenario)


def test_patience_ends_where_no_replica_is_left() -> None:
    async def scenario(scene: Scene) -> None:
        with pytest.raises(BackendError, match=r"no other took it within 0\.05 s") as caught:
            await scene.collect(scene.attempt(patience_s=0.05))
        assert not isinstance(caught.value, ReplicaLost)

    run(scenario)


@pytest.mark.parametrize(
    ("error", "kind", "match"),
    [
        (RuntimeError("the actor died"), ReplicaLost, "the actor died"),
        (BackPressureError(num_queued_requests=9, max_queued_requests=9), QueueFull, "9"),
    ],
)
def test_what_the_call_fails_of(error: Exception, kind: type[BackendError], match: str) -> None:
    async def scenario(scene: Scene) -> None:
        task = asyncio.create_task(scene.collect(scene.attempt()))
        (await scene.handle.calls.get()).future.set_exception(error)
        with pytest.raises(kind, match=match):
            await task

    run(scenario)


def test_a_replica_that_cannot_reach_the_ingress_is_one_to_avoid() -> None:
    """It has accepted nothing, but the error, as Ray hands it on, says who it is."""

    async def scenario(scene: Scene) -> None:
        task = asyncio.create_task(scene.collect(scene.attempt()))
        cause = IngressUnreachable("cut off", "no route to host")
        error = RayTaskError("generate", "trace", cause, proctitle="replica", pid=1, ip="::1")
        error = pickle.loads(pickle.dumps(error)).as_instanceof_cause()
        (await scene.handle.calls.get()).future.set_exception(error)
        with pytest.raises(ReplicaLost, match="no route to host") as lost:
            await task
        assert lost.value.replica == "cut off"

    run(scenario)


def test_last_deltas_that_never_come_are_not_waited_for_without_bound() -> None:
    """The call has returned: whatever became of the frames, the request goes on elsewhere."""

    async def scenario(scene: Scene) -> None:
        task = asyncio.create_task(scene.collect(scene.attempt()))
        (await scene.handle.calls.get()).future.set_result(True)
        with pytest.raises(ReplicaLost, match="without its last tokens"):
            await task
        assert asyncio.get_running_loop().time() == LAST_DELTA_GRACE_S

    run(scenario, run_virtually)


def test_calls_of_one_http_request_do_not_share_an_internal_id() -> None:
    async def scenario(scene: Scene) -> None:
        outer = serve_context._RequestContext(request_id="http", _internal_request_id="shared")
        token = serve_context._serve_request_context.set(outer)
        task = asyncio.create_task(scene.collect(scene.attempt()))
        call = await scene.handle.calls.get()
        assert call.internal_id == ""  # Serve draws one of the call's own
        assert serve_context._get_serve_request_context() is outer
        serve_context._serve_request_context.reset(token)
        task.cancel()

    run(scenario)


@pytest.mark.parametrize("failed", [True, False])
def test_a_failed_engine_is_a_lost_replica_and_a_refusal_is_not(failed: bool) -> None:
    async def scenario(scene: Scene) -> None:
        task = asyncio.create_task(scene.collect(scene.attempt()))
        call = await scene.handle.calls.get()
        channel = await scene.channels.get(call.dispatch.reply_to)
        channel.accept("one", None)
        channel.send(
            [
                TokenDelta(
                    "one",
                    0,
                    (),
                    finish_reason=FinishReason.ERROR,
                    error="it broke",
                    replica_failed=failed,
                )
            ]
        )
        if failed:
            with pytest.raises(ReplicaLost, match="it broke") as lost:
                await task
            assert lost.value.replica == "replica"
        else:
            assert [d.error for d in await task] == ["it broke"]

    run(scenario)


def test_a_refusal_of_what_was_served_elsewhere_is_that_replicas_alone() -> None:
    """A preempted request asks a smaller replica as well, and ends where it is."""

    async def scenario(scene: Scene) -> None:
        limits = FollowLimits(max_failovers=0, patience_s=60.0, max_moves=1, move_gain=2.0)
        backend = FailoverBackend(scene.backend, limits, 8)

        got: list[TokenDelta] = []
        begun = asyncio.Event()

        async def client() -> None:
            async with aclosing(backend.generate(REQUEST)) as stream:
                async for deltas in stream:
                    got.extend(deltas)
                    begun.set()

        task = asyncio.create_task(client())
        call = await scene.handle.calls.get()
        channel = await scene.channels.get(call.dispatch.reply_to)
        channel.accept("one", None)
        channel.send([delta(7)])
        await begun.wait()
        channel.send([TokenDelta("one", 0, (), receipt=Receipt(preemptions=1), wait_s=9.0)])
        rival = await scene.handle.calls.get()
        assert rival.request.request_id == "one/1"
        smaller = await ReplyChannels("smaller", lambda *_: None, lambda _: None).get(
            rival.dispatch.reply_to
        )
        smaller.accept("one/1", None)
        refusal = TokenDelta("one/1", 0, (), finish_reason=FinishReason.ERROR, error="too long")
        smaller.send([refusal])
        await rival.cancelled.wait()
        channel.send([delta(8, FinishReason.LENGTH)])
        await task
        assert [(d.token_ids, d.error) for d in got] == [((7,), None), ((8,), None)]

    run(scenario)


def test_a_connection_that_ends_names_the_replica() -> None:
    async def scenario(scene: Scene) -> None:
        task = asyncio.create_task(scene.collect(scene.attempt()))
        call = await scene.handle.calls.get()
        channel = await scene.channels.get(call.dispatch.reply_to)
        channel.accept("one", None)
        channel.send([delta(7)])
        channel.close()
        with pytest.raises(ReplicaLost, match="connection") as lost:
            await task
        assert lost.value.replica == "replica"

    run(scenario)
