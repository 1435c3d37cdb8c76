"""The Serve deployment of one replica: an engine, its health, its replies."""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from prometheus_client.metrics_core import Metric
from ray import serve

from replicas import ray_store
from replicas.config import EngineConfig
from replicas.core.scheduler_output import StepOutcome
from replicas.core.scheduler_stats import SchedulerStats
from replicas.engine.async_engine import AsyncEngine
from replicas.engine.engine import Engine
from replicas.feed import FeedServer
from replicas.feed_wire import METADATA_KEY
from replicas.host_store import HostStore, HostStoreError
from replicas.metrics import EngineMetrics
from replicas.models import loader, sources
from replicas.pressure import PressureGauge
from replicas.protocol import (
    BlockEvents,
    Dispatch,
    FinishReason,
    GenerateRequest,
    ReplicaReport,
    ReplicaSnapshot,
    TokenDelta,
)
from replicas.reply_channel import ReplyChannel, ReplyChannels

logger = logging.getLogger("ray.serve")

STEP_PATIENCE_S = 120.0
"""A step that takes longer makes the replica unhealthy: far above any real one."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What a replica is built from; plain values that travel."""

    source: str
    revision: str | None
    dtype: str
    device: str
    threads: int
    served_name: str
    engine: EngineConfig


class _Active:
    """A request being served."""

    def __init__(self, channel: ReplyChannel, choices: int) -> None:
        self.channel = channel
        self.open_choices = set(range(choices))
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, delta: TokenDelta) -> None:
        """Take note of a choice's last delta; an error ends the whole request."""
        if delta.finish_reason is FinishReason.ERROR:
            self.open_choices.clear()
        self.open_choices.discard(delta.choice)
        if not self.open_choices and not self.done.done():
            self.done.set_result(None)


class Replica:
    """Serves GenerateRequests; their deltas go to the ingress' listener, a frame a step.

    The Serve call of a request lasts as long as the request: Serve counts it, routes by it,
    and its cancellation is the request's.
    """

    async def __init__(self, settings: ReplicaSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        self._loop = asyncio.get_running_loop()
        self._id = serve.get_replica_context().replica_id.unique_id
        self._active: dict[str, _Active] = {}
        node_id = ray.get_runtime_context().get_node_id()
        self._feed = FeedServer(
            ray.util.get_node_ip_address(),
            self._id,
            node_id,
            is_well=lambda: self._failure() is None,
        )
        self._engine = AsyncEngine(functools.partial(self._build, settings), self._deliver)
        self._channels = ReplyChannels(self._id, self._engine.abort, self._lose_channel)
        self._snapshot = ReplicaSnapshot()
        self._info = await self._engine.start()
        self._feed_address = await self._feed.start(self._info)
        self._metrics = EngineMetrics(settings.served_name, self._id, self._info)
        self._pressure = PressureGauge(self._info, time.monotonic())

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Serve asks once and tells every router: where the feed is."""
        return {METADATA_KEY: asdict(self._feed_address)}

    async def generate(self, request: GenerateRequest, dispatch: Dispatch) -> bool:
        """Serve a request to its end; cancelling ends it early. False where the router sent it
        only to say that no replica was good enough."""
        if dispatch.declined:
            return False
        channel = await self._channels.get(dispatch.reply_to)
        channel.accept(request.request_id, dispatch.placement)
        active = self._active[request.request_id] = _Active(channel, request.n)
        self._engine.submit(request)
        try:
            await active.done
            return True
        finally:
            del self._active[request.request_id]
            if active.open_choices:
                self._engine.abort(request.request_id)

    async def report(self) -> ReplicaReport:
        """What this replica is and does."""
        return ReplicaReport(self._id, self._info, self._snapshot, self._failure())

    async def metrics(self) -> list[Metric]:
        """Prometheus families; never waits for the engine."""
        return self._metrics.collect()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for them now and then, where the number of replicas follows the load."""
        return self._pressure.read(self._snapshot, time.monotonic()).as_stats()

    async def check_health(self) -> None:
        """Serve's health check: progress of the engine, not a ping."""
        failure = self._failure()
        if failure is not None:
            raise RuntimeError(failure)

    def _failure(self) -> str | None:
        return self._engine.failure(STEP_PATIENCE_S)

    def _build(self, settings: ReplicaSettings) -> Engine:
        """On the engine's thread."""
        engine = build_engine(settings)
        # What a predecessor left in host memory can be found before the first step.
        self._loop.call_soon_threadsafe(self._feed.publish, engine.take_events(), engine.snapshot())
        return engine

    def _deliver(self, outcome: StepOutcome, engine: Engine) -> None:
        """On the engine's thread: one hand-over a step."""
        stats = copy.copy(engine.stats)
        stats.finished = dict(stats.finished)
        self._loop.call_soon_threadsafe(
            self._take_in, outcome, engine.take_events(), engine.snapshot(), stats
        )

    def _take_in(
        self,
        outcome: StepOutcome,
        events: BlockEvents,
        snapshot: ReplicaSnapshot,
        stats: SchedulerStats,
    ) -> None:
        self._snapshot = snapshot
        frames: dict[ReplyChannel, list[TokenDelta]] = defaultdict(list)
        for delta in outcome.deltas:
            active = self._active.get(delta.request_id)
            if active is not None:
                frames[active.channel].append(delta)
        for channel, deltas in frames.items():
            channel.send(deltas)
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._active[delta.request_id].end(delta)
        self._feed.publish(events, snapshot)
        self._metrics.observe(outcome, snapshot, stats)

    def _lose_channel(self, channel: ReplyChannel) -> None:
        for active in self._active.values():
            if active.channel is channel and not active.done.done():
                active.done.set_exception(ConnectionError("the ingress' connection ended"))


def build_engine(settings: ReplicaSettings) -> Engine:
    """Load the model and build its engine, on the thread that will run it."""
    torch.set_num_threads(settings.threads)
    folder: Path = sources.resolve(settings.source, settings.revision)
    model = loader.load(folder, settings.dtype, settings.device, settings.engine.kernel_backend)
    swap_bytes = int(settings.engine.swap_space * 2**30)
    open_store = functools.partial(_attach_store, swap_bytes) if swap_bytes else None
    return Engine(settings.engine, model, settings.device, open_store=open_store)


def _attach_store(swap_bytes: int, identity: bytes, block_bytes: int) -> HostStore | None:
    """Host memory of the node's keeper. A replica serves without it, if need be: what it would
    restore it computes."""
    try:
        return ray_store.attach(identity, swap_bytes, block_bytes)
    except HostStoreError as error:
        logger.warning("no host tier, preempted requests are recomputed: %s", error)
        return None
