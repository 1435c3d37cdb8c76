"""The engine's own thread, and the front that an event loop talks to."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from replicas.core.scheduler import RequestRefusedError
from replicas.core.scheduler_output import StepOutcome
from replicas.engine.engine import Engine
from replicas.protocol import EngineInfo, FinishReason, GenerateRequest, TokenDelta

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str
    choice: int | None


class AsyncEngine:
    """Builds and runs an Engine on one thread that owns all its state.

    The thread also loads the model: OpenMP keeps a team of workers for each thread that
    computes, and a second team would spin on the same cores. What a step changed reaches
    the loop as ONE call of `deliver(outcome, engine)` on the engine thread; the receiver
    hands it over with `call_soon_threadsafe`.
    """

    def __init__(
        self, build: Callable[[], Engine], deliver: Callable[[StepOutcome, Engine], None]
    ) -> None:
        self._build = build
        self._deliver = deliver
        self._inbox: deque[GenerateRequest | _Abort] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._failure: Exception | None = None
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    async def start(self) -> EngineInfo:
        """Build the engine; raises what the building raised."""
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = loop.create_future()
        self._loop = loop
        self._thread.start()
        return await self._ready

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request; its outcome, a refusal too, comes as deltas."""
        self._put(request)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, before the next step."""
        self._put(_Abort(request_id, choice))

    def failure(self, patience_s: float) -> str | None:
        """Why the engine is unhealthy: it died, or has had work but no step for `patience_s`."""
        if self._failure is not None:
            return f"the engine stopped: {self._failure!r}"
        busy_since = self._busy_since
        if busy_since is not None and time.monotonic() - busy_since > patience_s:
            return f"no step has ended for {patience_s:g} s although there is work"
        return None

    def stop(self) -> None:
        """End the thread after the step in progress."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _put(self, message: GenerateRequest | _Abort) -> None:
        self._inbox.append(message)
        self._wake.set()

    def _main(self) -> None:
        try:
            engine = self._build()
        except Exception as error:  # noqa: BLE001 - whatever it was, `start` raises it
            self._loop.call_soon_threadsafe(self._ready.set_exception, error)
            return
        self._loop.call_soon_threadsafe(self._ready.set_result, engine.info)
        try:
            self._run(engine)
        except Exception as error:  # the thread's edge: whoever waits must be told
            logger.exception("the engine failed")
            self._failure = error
            self._fail_all(engine, f"the engine failed: {error!r}")
        finally:
            engine.close()

    def _run(self, engine: Engine) -> None:
        while not self._stopping:
            self._drain_inbox(engine)
            if not engine.has_work:
                self._busy_since = None
                self._wake.wait()
                self._wake.clear()
                continue
            self._busy_since = time.monotonic()
            self._deliver(engine.step(), engine)

    def _drain_inbox(self, engine: Engine) -> None:
        while self._inbox:
            self._handle(self._inbox[0], engine)
            self._inbox.popleft()  # only now: what breaks the engine is told of it as well

    def _handle(self, message: GenerateRequest | _Abort, engine: Engine) -> None:
        if isinstance(message, _Abort):
            self._deliver(engine.abort(message.request_id, message.choice), engine)
            return
        try:
            engine.add(message)
        except RequestRefusedError as refusal:
            self._deliver(_error_outcome(message.request_id, str(refusal), failed=False), engine)

    def _fail_all(self, engine: Engine, error: str) -> None:
        for request_id in engine.live_request_ids():
            self._deliver(_error_outcome(request_id, error, failed=True), engine)
        while not self._stopping:  # submissions must not wait for ever, now or later
            while self._inbox:
                message = self._inbox.popleft()
                if isinstance(message, GenerateRequest):
                    outcome = _error_outcome(message.request_id, error, failed=True)
                    self._deliver(outcome, engine)
            self._wake.wait()
            self._wake.clear()


def _error_outcome(request_id: str, error: str, *, failed: bool) -> StepOutcome:
    delta = TokenDelta(
        request_id=request_id,
        choice=0,
        token_ids=(),
        finish_reason=FinishReason.ERROR,
        error=error,
        replica_failed=failed,
    )
    return StepOutcome((delta,))
