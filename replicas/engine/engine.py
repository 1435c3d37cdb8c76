"""One replica's engine: schedule, run, update. Synchronous and single-threaded."""

from __future__ import annotations

import time
from collections.abc import Callable

from replicas.config import EngineConfig
from replicas.core.block_hash import BlockHasher
from replicas.core.block_pool import BlockPool
from replicas.core.kv_manager import KVManager
from replicas.core.preemption.last_admitted import LastAdmitted
from replicas.core.scheduler import Scheduler, SchedulerConfig
from replicas.core.scheduler_output import StepOutcome
from replicas.core.scheduler_stats import SchedulerStats
from replicas.core.updater import StepUpdater
from replicas.engine import pool_size
from replicas.engine.kv_pool import KVPool
from replicas.engine.model_runner import ModelRunner
from replicas.models.hf_adapter import PagedModel
from replicas.protocol import EngineInfo, GenerateRequest, ReplicaSnapshot


class Engine:
    """Serves choices on one device. Callers: add and abort between steps, never during one."""

    def __init__(
        self,
        config: EngineConfig,
        model: PagedModel,
        device: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        spec = model.spec
        blocks = pool_size.num_blocks(config, spec, device)
        dtype = pool_size.kv_dtype(config, spec)
        limit = pool_size.max_model_len(config, spec, blocks)
        self.info = EngineInfo(
            device=device,
            dtype=spec.dtype,
            kv_dtype=str(dtype).removeprefix("torch."),
            block_size=config.block_size,
            num_blocks=blocks,
            max_model_len=limit,
            vocab_size=spec.vocab_size,
        )
        pool = KVPool(
            spec, num_blocks=blocks, block_size=config.block_size, dtype=dtype, device=device
        )
        hasher = BlockHasher(
            fingerprint=spec.fingerprint,
            kv_dtype=self.info.kv_dtype,
            block_size=config.block_size,
        )
        kv = KVManager(BlockPool(blocks), hasher, caching=config.enable_prefix_caching)
        scheduling = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=limit,
            by_priority=config.scheduling_policy == "priority",
            min_progress_tokens=config.min_progress_tokens,
        )
        self._clock = clock
        self._scheduler = Scheduler(scheduling, kv, LastAdmitted())
        self._updater = StepUpdater(self._scheduler, spec.eos_token_ids)
        self._runner = ModelRunner(model, pool, device)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    def snapshot(self) -> ReplicaSnapshot:
        """Queues and blocks as they are between two steps."""
        scheduler, pool = self._scheduler, self._scheduler.kv.pool
        return ReplicaSnapshot(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            used_blocks=pool.num_used,
            cached_blocks=pool.num_cached,
            pending_tokens=sum(
                c.num_remaining_tokens for c in (*scheduler.waiting, *scheduler.running)
            ),
        )

    def live_request_ids(self) -> list[str]:
        """The requests that have not ended."""
        return list(self._scheduler.requests)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; raises RequestRefusedError where it can never be served."""
        self._scheduler.add(request, self._clock())

    def abort(self, request_id: str, choice: int | None = None) -> StepOutcome:
        """End a request, or one choice of it, in whatever state; unknown ids are fine."""
        return self._updater.abort(request_id, choice, self._clock())

    def step(self) -> StepOutcome:
        """Compute one batch and say what it changed."""
        output = self._scheduler.schedule(self._clock())
        result = self._runner.run(output)
        return self._updater.update(output, result, self._clock())

    def check_integrity(self) -> None:
        """Raise AssertionError where blocks, references and queues disagree."""
        self._scheduler.check_integrity()
