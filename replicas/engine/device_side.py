"""What of an engine depends on its device: how much memory there is, who computes and copies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from kernels import dispatch
from replicas.config import EngineConfig
from replicas.core.scheduler_output import SchedulerOutput
from replicas.engine import synthetic_steps
from replicas.engine.cuda_copy_queues import CudaCopyQueues
from replicas.engine.cuda_memory import measure
from replicas.engine.device_memory import DeviceMemory
from replicas.engine.device_runner import DeviceRunner
from replicas.engine.graph_buckets import buckets
from replicas.engine.host_copier import DirectCopier, HostCopier
from replicas.engine.in_flight import Runner
from replicas.engine.kv_format import KVFormat
from replicas.engine.kv_pool import KVPool
from replicas.engine.model_runner import ModelRunner
from replicas.engine.staged_copier import StagedCopier
from replicas.engine.triton_runner import triton_runner
from replicas.host_store import HostStore
from replicas.models.hf_adapter import PagedModel
from replicas.models.spec import ModelSpec

logger = logging.getLogger(__name__)


class DeviceSide(Protocol):
    """One engine's device."""

    @property
    def measure(self) -> Callable[[], DeviceMemory] | None:
        """Finds out what its memory is taken by; None where the KV pool's size is configured."""
        ...

    def runner(self, pool: KVPool, max_model_len: int) -> Runner:
        """Who computes steps over the pool, warmed up."""
        ...

    def copier(self, pool: KVPool, store: HostStore, clock: Callable[[], float]) -> HostCopier:
        """Who copies blocks to the host and back."""
        ...


def choose(config: EngineConfig, model: PagedModel, kv: KVFormat, device: str) -> DeviceSide:
    """That of `device`: `cpu` or `cuda`.

    Raises:
        KernelBackendError: the configured kernels cannot run here.
        ValueError: `kernel_backend: triton`, and Triton's kernels do not take the model's shapes.
    """
    if device == "cpu":
        dispatch.backend(config.kernel_backend, device)  # refuses Triton's
        return CpuSide(model)
    return GpuSide(config, model, kv, device)


class CpuSide:
    """Steps and copies take turns: both would use the same cores."""

    measure = None

    def __init__(self, model: PagedModel) -> None:
        self._model = model

    def runner(self, pool: KVPool, max_model_len: int) -> Runner:
        """With torch's kernels."""
        return ModelRunner(self._model, pool, "cpu")

    def copier(self, pool: KVPool, store: HostStore, clock: Callable[[], float]) -> HostCopier:
        """Between steps."""
        return DirectCopier(pool, store, clock)


class GpuSide:
    """Steps and copies run beside each other and the host, with Triton's kernels or torch's."""

    def __init__(self, config: EngineConfig, model: PagedModel, kv: KVFormat, device: str) -> None:
        self._config = config
        self._model = model
        self._kv = kv
        self._device = device
        self._backend = dispatch.backend(config.kernel_backend, device)
        if self._backend == "triton":
            self._try_triton()

    def measure(self) -> DeviceMemory:
        """Run the steps that take the most memory over a pool of a single block."""
        runner = self._make(self._small_pool(), self._model.spec.max_position)
        steps = largest_steps(self._config, self._model.spec)
        return measure([partial(_run, runner, step) for step in steps])

    def runner(self, pool: KVPool, max_model_len: int) -> Runner:
        """Captures graphs; whatever else a step may need has been compiled before."""
        runner = self._make(pool, max_model_len)
        if isinstance(runner, DeviceRunner):
            runner.capture(self._config.max_num_seqs)
        return runner

    def copier(self, pool: KVPool, store: HostStore, clock: Callable[[], float]) -> HostCopier:
        """On streams of its own."""
        moves = dispatch.block_moves(self._backend)
        return StagedCopier(pool, store, clock, CudaCopyQueues(), moves)

    def _try_triton(self) -> None:
        """Compile and run every kernel that a step may need."""
        try:
            runner = self._make(self._small_pool(), self._model.spec.max_position)
            for step in synthetic_steps.warm_up_steps(self._config.block_size):
                _run(runner, step)
        except ValueError as error:
            if self._config.kernel_backend == "triton":
                raise
            logger.warning("torch's kernels are used, which are slower: %s", error)
            self._backend = "torch"

    def _make(self, pool: KVPool, max_model_len: int) -> Runner:
        if self._backend == "torch":
            return ModelRunner(self._model, pool, self._device)
        return triton_runner(self._model, pool, max_model_len)

    def _small_pool(self) -> KVPool:
        return KVPool(
            self._model.spec,
            num_blocks=1,
            block_size=self._config.block_size,
            dtype=self._kv.dtype,
            device=self._device,
            scales=self._kv.scales,
        )


def largest_steps(config: EngineConfig, spec: ModelSpec) -> tuple[SchedulerOutput, ...]:
    """The steps that take the most memory: a prefill of as many tokens as a step may have, all of
    whose logits are needed, and the largest decode step that is captured. They use block 1 only."""
    tokens = config.max_num_batched_tokens
    parts: list[SchedulerOutput] = []
    while tokens:
        length = min(tokens, spec.max_position)
        table = (1,) * -(-length // config.block_size)
        parts.append(synthetic_steps.prefill_step(length, table, index=len(parts), scored=True))
        tokens -= length
    rows = buckets(config.max_num_seqs)[-1]
    return (
        synthetic_steps.together(*parts),
        synthetic_steps.decode_step([(1,)] * rows, context=config.block_size - 1),
    )


def _run(runner: Runner, step: SchedulerOutput) -> None:
    runner.launch(step).result()
