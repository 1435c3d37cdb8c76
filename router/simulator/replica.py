"""A simulated replica: the real scheduler and its books over a device that computes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.core.block_events import BlockEventLog
from replicas.core.block_hash import BlockHasher
from replicas.core.block_pool import BlockPool
from replicas.core.cost_model import CostModel
from replicas.core.host_tier import HostTier
from replicas.core.kv_manager import KVManager
from replicas.core.offloader import Offloader
from replicas.core.preemption.priority import Priority
from replicas.core.request import ChoiceKey
from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler import Scheduler, SchedulerConfig
from replicas.core.scheduler_output import (
    SampledToken,
    SchedulerOutput,
    StepOutcome,
    StepResult,
)
from replicas.core.updater import StepUpdater
from replicas.protocol import EngineInfo, GenerateRequest
from router.simulator.host_link import HostLink
from router.simulator.machine import Machine
from router.simulator.node import Node
from router.simulator.trace import TraceRequest

END_TOKEN = 2**32 - 1
"""Ends an output."""
_FIRST_OUTPUT_TOKEN = 2**31
"""Output tokens are of their request alone, and above all block ids of a trace."""


class StandstillError(RuntimeError):
    """A replica has work and does nothing: a mistake in the scheduler, not in the trace."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What every replica of a simulation is like."""

    machine: Machine
    scheduling: SchedulerConfig
    block_size: int
    """Tokens."""
    num_blocks: int
    host_blocks: int = 0
    spill_tokens: int | None = 512
    """As the engine's `spill_prefix_tokens`."""

    @property
    def engine(self) -> EngineInfo:
        """What a replica would say of itself."""
        return EngineInfo(
            device="simulated",
            dtype="bfloat16",
            kv_dtype="bfloat16",
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_model_len=self.scheduling.max_model_len,
            vocab_size=END_TOKEN + 1,
            block_bytes=self.machine.block_bytes(self.block_size),
            host_blocks=self.host_blocks,
            fingerprint=self.machine.model.name,
        )


class SimulatedReplica:
    """Steps like the engine: `begin_step` schedules and says when the step will end, `end_step`
    takes its results in. Requests may be added at any time between."""

    def __init__(self, settings: ReplicaSettings, node: Node) -> None:
        engine = settings.engine
        self.events = BlockEventLog()
        hasher = BlockHasher(
            fingerprint=engine.fingerprint, kv_dtype=engine.kv_dtype, block_size=engine.block_size
        )
        pool = BlockPool(settings.num_blocks, self.events)
        offloader = None
        if settings.host_blocks:
            tier = HostTier(settings.host_blocks, self.events)
            offloader = Offloader(pool, tier, node.join(tier))
        kv = KVManager(
            pool,
            hasher,
            costs=CostModel(engine.block_bytes, settings.machine.rates()),
            offloader=offloader,
            spill_tokens=settings.spill_tokens if offloader else None,
        )
        self.scheduler = Scheduler(settings.scheduling, kv, Priority())
        self._updater = StepUpdater(self.scheduler, (END_TOKEN,))
        self._machine = settings.machine
        self._link = HostLink(engine.block_bytes / settings.machine.copy_bandwidth, node.holds)
        self._outputs: dict[str, tuple[int, SampledToken]] = {}
        self._step: tuple[SchedulerOutput, float] | None = None

    @property
    def idle(self) -> bool:
        """Whether no step is under way and there is no reason to begin one."""
        return self._step is None and not self.scheduler.has_work

    @property
    def stepping(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    def add(self, data: GenerateRequest, number: int, outputs: int, now: float) -> None:
        """Queue request `number`, which will produce `outputs` tokens.

        Raises:
            RequestRefusedError: it can never be served.
        """
        self.scheduler.add(data, now)
        self._outputs[data.request_id] = (outputs, SampledToken(_FIRST_OUTPUT_TOKEN + number))

    def begin_step(self, now: float) -> float:
        """Schedule a step; gives the time of its end.

        Raises:
            StandstillError: there is neither anything to compute nor a copy to wait for.
        """
        output = self.scheduler.schedule(now)
        self._link.start(output.host_copies, now)
        self._step = output, now
        if output.scheduled:
            return now + self._machine.step_s(output)
        ends = self._link.next_end()
        if ends is None:
            raise StandstillError(f"{len(self.scheduler.requests)} requests wait for nothing")
        return ends

    def end_step(self, now: float) -> StepOutcome:
        """Take in what the step computed and which copies ended."""
        assert self._step is not None
        output, began = self._step
        self._step = None
        sampled = {
            item.key: self._draw(item.key, item.draws[0].output_index)
            for item in output.scheduled
            if item.draws
        }
        seconds = now - began if output.scheduled else 0.0
        outcome = self._updater.update(output, StepResult(sampled, {}, seconds), now)
        if self.scheduler.num_copies:
            self.scheduler.end_copies(self._link.ended(now), now)
        return outcome

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        del self._outputs[request_id]

    def _draw(self, key: ChoiceKey, index: int) -> SampledToken:
        length, token = self._outputs[key[0]]
        return _END if index + 1 >= length else token


_END = SampledToken(END_TOKEN)


def make_request(
    request: TraceRequest, number: int, block_size: int, max_tokens: int
) -> GenerateRequest:
    """What a client of a trace's request `number` would send. How long the output gets is known
    to the simulated device alone: the request only says what it allows."""
    return GenerateRequest(
        request_id=str(number),
        prompt_token_ids=request.prompt_token_ids(block_size),
        sampling=SamplingParams(max_tokens=max_tokens, seed=0),
    )
