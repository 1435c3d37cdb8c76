"""The HTTP ingress: a Serve deployment around the ASGI app."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cluster import metrics
from cluster.broadcast import ask_all
from cluster.config import LimitsConfig, RecordingConfig
from cluster.failover import FailoverBackend
from cluster.follower import FollowLimits
from cluster.http import create_app
from cluster.openai.service import Limits, Service
from cluster.recording import TraceRecorder
from cluster.replica_backend import ReplicaBackend
from cluster.reply_listener import ReplyListener
from cluster.tokenizer import Tokenizer
from replicas.models import sources
from replicas.protocol import ReplicaReport
from router import metrics as router_metrics

logger = logging.getLogger("ray.serve")

ANSWER_TIMEOUT_S = 2.0
"""How long replicas may take to answer /health and /metrics: their loops never compute."""


RECORDER_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """What an ingress is built from; plain values that travel."""

    source: str
    revision: str | None
    served_name: str
    limits: LimitsConfig
    follow: FollowLimits
    recording: RecordingConfig | None
    may_sleep: bool
    """Whether it is as it should be that there is no replica: the next request brings one."""


@serve.ingress()
class Ingress:
    """Tokenises, places, streams; replicas speak token ids."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: IngressSettings, replicas: DeploymentHandle[Any]
    ) -> None:
        self._replicas = replicas
        self._served_name = settings.served_name
        self._may_sleep = settings.may_sleep
        self._timeouts = 0
        first: ReplicaReport = await replicas.report.remote()  # waits for a replica to be up
        self._engine = first.engine
        listener = ReplyListener(ray.util.get_node_ip_address())
        await listener.start()
        folder = await asyncio.to_thread(sources.resolve, settings.source, settings.revision)
        limits = settings.limits
        self._recorder = _recorder(settings.recording)
        self._backend = FailoverBackend(
            ReplicaBackend(replicas, listener),
            settings.follow,
            limits.max_queued_requests,
            *([] if self._recorder is None else [self._recorder.note]),
        )
        self._service = Service(
            model_names=(settings.served_name,),
            max_model_len=first.engine.max_model_len,
            kv_pool_tokens=first.engine.kv_tokens,
            vocab_size=first.engine.vocab_size,
            tokenizer=Tokenizer.load(folder),
            backend=self._backend,
            metrics=self.metrics,
            health=self.health,
            version=importlib.metadata.version("quire"),
            created=int(time.time()),
            limits=http_limits(limits),
            note_timeout=self._count_timeout,
        )
        logger.info(await self.summary())
        # What is loaded by now stays: a full collection would look through all of it while every
        # stream waits.
        gc.collect()
        gc.freeze()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return create_app(self._service)

    async def metrics(self) -> bytes:
        """Prometheus text: all replicas that answer in time, this ingress and its router."""
        replicas = await ask_all(self._replicas, "metrics", ANSWER_TIMEOUT_S) or ()
        own = metrics.ingress(self._backend.hops, self._timeouts)
        return metrics.exposition([*replicas, router_metrics.REGISTRY.collect(), own])

    async def health(self) -> tuple[bool, Mapping[str, Any]]:
        """Whether any replica makes progress, or none is needed, and what each of them does."""
        reports = await self._reports()
        healthy = any(report.failure is None for report in reports or ())
        if reports is None and self._may_sleep:
            healthy = True
        replicas = {
            report.replica_id: asdict(report.snapshot) | {"failure": report.failure}
            for report in reports or ()
        }
        return healthy, {"replicas": replicas}

    async def summary(self) -> str:
        """One line on what is served, for whoever started the cluster."""
        engine = self._engine
        count = len(await self._reports() or ())
        fit = engine.kv_tokens // engine.max_model_len
        return (
            f"model {self._served_name}, {engine.device}, {engine.dtype}, "
            f"{count} replica{'s' if count > 1 else ''}, each with a KV pool of "
            f"{engine.num_blocks} blocks = {engine.kv_tokens} tokens ({engine.kv_dtype}), room "
            f"for {fit} request{'' if fit == 1 else 's'} of max_model_len {engine.max_model_len}, "
            + (
                f"a host tier of {engine.host_blocks} blocks"
                if engine.host_blocks
                else "no host tier"
            )
        )

    def __del__(self) -> None:
        """Serve calls it when the ingress is to end: nothing is served any more."""
        recorder = getattr(self, "_recorder", None)  # there is none where __init__ failed
        if recorder is not None:
            recorder.close(RECORDER_CLOSE_S)

    async def _reports(self) -> list[ReplicaReport] | None:
        """Of the replicas that answer in time; None where there is no replica."""
        return await ask_all(self._replicas, "report", ANSWER_TIMEOUT_S)

    def _count_timeout(self) -> None:
        self._timeouts += 1


def http_limits(config: LimitsConfig) -> Limits:
    """The operator's limits, as the HTTP front takes them."""
    return Limits(
        max_body_bytes=int(config.max_body_mib * 2**20),
        max_prompts=config.max_batch_prompts,
        max_choices=config.max_choices,
        request_timeout_s=config.request_timeout_s,
    )


def _recorder(config: RecordingConfig | None) -> TraceRecorder | None:
    """An ingress serves without one if its file cannot be made."""
    if config is None:
        return None
    try:
        started_at = asyncio.get_running_loop().time()
        recorder = TraceRecorder(Path(config.folder), config.max_mib, started_at)
    except OSError as error:
        logger.warning("no trace is recorded: %s", error)
        return None
    logger.info("recording a trace: %s", recorder.path)
    return recorder
