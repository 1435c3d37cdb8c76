"""The engine's loop: schedule, launch, take the results in, with steps overlapping or not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from replicas.core.scheduler import Scheduler
from replicas.core.scheduler_output import SchedulerOutput, StepOutcome
from replicas.core.updater import StepUpdater
from replicas.engine.host_copier import HostCopier
from replicas.engine.in_flight import InFlight, Runner

_COPY_WAIT_S = 0.002
"""Of a step that has nothing to do but to wait for copies."""


def depth_for(device: str) -> int:
    """A CPU's host is busy with the step itself: to run ahead would only make results late."""
    return 1 if device == "cpu" else 2


@dataclass(frozen=True, slots=True)
class _Flight:
    output: SchedulerOutput
    step: InFlight
    begin: float


class Pipeline:
    """Keeps up to `depth` steps in flight and takes their results in, in order.

    With 1 the host waits for each step before it schedules the next. With 2 it schedules a step
    while the device computes the one before: choices take part with one token not known yet, and
    how a step changed them (they ended, forked, were aborted) shows one step late. Blocks that
    come free then may still be written by the step in flight; what is launched or copied later
    comes after it, because a runner computes in the order of launches and `HostCopier.start`
    orders copies behind all of them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        updater: StepUpdater,
        runner: Runner,
        copier: HostCopier | None,
        clock: Callable[[], float],
        depth: int,
    ) -> None:
        """`copier` is None without a host tier."""
        if depth not in (1, 2):
            raise ValueError(f"depth is 1 or 2, not {depth}: one token of a choice can be unknown")
        self._scheduler = scheduler
        self._updater = updater
        self._runner = runner
        self._copier = copier
        self._clock = clock
        self._depth = depth
        self._flights: deque[_Flight] = deque()
        self._ended_at = 0.0

    @property
    def has_work(self) -> bool:
        """Whether the scheduler has, or results are to be taken."""
        return self._scheduler.has_work or bool(self._flights)

    def step(self) -> StepOutcome:
        """Give the device what it can take, wait for the oldest step, say what it changed."""
        self._fill()
        flight = self._flights.popleft()
        result = flight.step.result()
        now = self._clock()
        # A step that was launched behind another began when that one had ended.
        seconds = now - max(flight.begin, self._ended_at)
        self._ended_at = now
        outcome = self._updater.update(flight.output, replace(result, compute_s=seconds), now)
        self._end_copies(idle=not flight.output.scheduled)
        return outcome

    def _fill(self) -> None:
        while len(self._flights) < self._depth:
            ahead = bool(self._flights)
            if ahead and not self._scheduler.can_run_ahead:
                return
            output = self._scheduler.schedule(self._clock())
            if self._copier is not None:
                self._copier.start(output.host_copies)
            if not ahead or output.scheduled:
                begin = self._clock()
                self._flights.append(_Flight(output, self._runner.launch(output), begin))
            if not output.scheduled:
                return

    def _end_copies(self, *, idle: bool) -> None:
        if self._copier is None or not self._scheduler.num_copies:
            return
        if idle:
            self._copier.wait(_COPY_WAIT_S)
        self._scheduler.end_copies(self._copier.ended(), self._clock())
