"""One replica's engine: schedule, launch, update. Single-threaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from replicas.config import EngineConfig
from replicas.core import replica_snapshot
from replicas.core.block_events import BlockEventLog
from replicas.core.block_hash import BlockHasher
from replicas.core.block_pool import BlockPool
from replicas.core.cost_model import CostModel
from replicas.core.kv_manager import KVManager
from replicas.core.preemption.preempter import PreemptionMode
from replicas.core.scheduler import Scheduler, SchedulerConfig
from replicas.core.scheduler_output import StepOutcome
from replicas.core.scheduler_stats import SchedulerStats
from replicas.core.updater import StepUpdater
from replicas.engine import device_side, pool_size, probe, victim_policy
from replicas.engine.host_memory import HostMemory, MakeCopier, OpenStore
from replicas.engine.in_flight import Runner
from replicas.engine.kv_format import KVFormat
from replicas.engine.kv_pool import KVPool
from replicas.engine.pipeline import Pipeline, depth_for
from replicas.models.hf_adapter import PagedModel
from replicas.protocol import BlockEvents, EngineInfo, GenerateRequest, ReplicaSnapshot

MakeRunner = Callable[[KVPool, int], Runner]
"""(pool, tokens that a choice may reach) -> who computes steps over it."""

logger = logging.getLogger(__name__)


class Engine:
    """Serves choices on one device. Callers: add and abort between steps, never during one."""

    def __init__(
        self,
        config: EngineConfig,
        model: PagedModel,
        device: str,
        clock: Callable[[], float] = time.monotonic,
        open_store: OpenStore | None = None,
        make_copier: MakeCopier | None = None,
        make_runner: MakeRunner | None = None,
        depth: int | None = None,
    ) -> None:
        """`open_store` gives the host tier its memory; without it there is none. `make_copier`
        gives who moves blocks there and back, `make_runner` who computes steps, and `depth` how
        many of them are in flight, where the device's usual will not do."""
        spec = model.spec
        kv_format = KVFormat.choose(config, model, device)
        side = device_side.choose(config, model, kv_format, device)
        blocks = pool_size.num_blocks(config, spec, side.measure)
        limit = pool_size.max_model_len(config, spec, blocks)
        pool = KVPool(
            spec,
            num_blocks=blocks,
            block_size=config.block_size,
            dtype=kv_format.dtype,
            device=device,
            scales=kv_format.scales,
        )
        hasher = BlockHasher(
            fingerprint=spec.fingerprint,
            kv_dtype=kv_format.name,
            kv_scales=kv_format.digest,
            block_size=config.block_size,
        )
        self._clock = clock
        runner = (make_runner or side.runner)(pool, limit)
        self._events = BlockEventLog()
        block_pool = BlockPool(blocks, self._events)
        self._host = HostMemory.open(
            open_store,
            pool,
            block_pool,
            hasher,
            clock,
            make_copier or side.copier,
            # Without caching, what the host keeps is private.
            self._events if config.enable_prefix_caching else None,
        )
        self.info = EngineInfo(
            device=device,
            dtype=spec.dtype,
            kv_dtype=kv_format.name,
            block_size=config.block_size,
            num_blocks=blocks,
            max_model_len=limit,
            vocab_size=spec.vocab_size,
            block_bytes=pool.block_bytes,
            host_blocks=self._host.num_slots if self._host else 0,
            fingerprint=spec.fingerprint,
            kv_scales=kv_format.digest,
        )
        costs = CostModel(pool.block_bytes)
        if self._host is not None:
            costs = self._host.probe(runner, config.max_num_batched_tokens)
        costs.decode = probe.decode_steps(
            runner, pool, max_choices=config.max_num_seqs, clock=clock
        )
        kv = KVManager(
            block_pool,
            hasher,
            costs=costs,
            caching=config.enable_prefix_caching,
            offloader=self._host.offloader if self._host else None,
            spill_tokens=config.spill_prefix_tokens if self._host else None,
        )
        scheduling = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=limit,
            by_priority=config.scheduling_policy == "priority",
            min_progress_tokens=config.min_progress_tokens,
            preemption_mode=PreemptionMode(config.preemption_mode),
            look_ahead=config.admission == "look_ahead",
            watermark=config.watermark,
            hysteresis=config.preemption_hysteresis,
            overcommit=config.overcommit,
            restore_patience_s=config.restore_patience_s,
        )
        policy = victim_policy.make(config.preemption_policy)
        self._scheduler = Scheduler(scheduling, kv, policy)
        self._updater = StepUpdater(self._scheduler, spec.eos_token_ids)
        self._pipeline = Pipeline(
            self._scheduler,
            self._updater,
            runner,
            self._host.copier if self._host else None,
            clock,
            depth_for(device) if depth is None else depth,
        )

    @property
    def has_work(self) -> bool:
        return self._pipeline.has_work

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    @property
    def costs(self) -> CostModel:
        """What the measured rates are."""
        return self._scheduler.costs

    def snapshot(self) -> ReplicaSnapshot:
        """Queues, blocks and rates as they are between two steps."""
        return replica_snapshot.take(self._scheduler)

    def take_events(self) -> BlockEvents:
        """What became findable, and what ceased to be, since the last call. What nobody takes
        is kept, an entry for each block."""
        return self._events.take()

    def live_request_ids(self) -> list[str]:
        """The requests that have not ended."""
        return list(self._scheduler.requests)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; raises RequestRefusedError where it can never be served."""
        self._scheduler.add(request, self._clock())

    def abort(self, request_id: str, choice: int | None = None) -> StepOutcome:
        """End a request, or one choice of it, in whatever state; unknown ids are fine."""
        return self._logged(self._updater.abort(request_id, choice, self._clock()))

    def step(self) -> StepOutcome:
        """Compute one batch and say what it changed. Where steps overlap, the next is under way."""
        return self._logged(self._pipeline.step())

    def check_integrity(self) -> None:
        """Raise AssertionError where blocks, references and queues disagree."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Give host memory up; the engine cannot step after it."""
        if self._host is not None:
            self._host.close()

    @staticmethod
    def _logged(outcome: StepOutcome) -> StepOutcome:
        for cost in outcome.resumed:
            logger.debug("preemption: %s", cost)
        return outcome
