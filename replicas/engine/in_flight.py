"""Steps that a device was given: who takes them, and their results to come."""

from __future__ import annotations

from typing import Protocol

from replicas.core.scheduler_output import SchedulerOutput, StepResult


class InFlight(Protocol):
    """One step on its way through the device."""

    def result(self) -> StepResult:
        """Wait for its end. To be called once, in the order of the launches."""
        ...


class Runner(Protocol):
    """Computes steps in the order in which they are launched."""

    def launch(self, output: SchedulerOutput) -> InFlight:
        """Give the device a step. Where it computes beside the host, this does not wait for it.

        A PENDING token is the one that the step launched just before draws for the same key.
        """
        ...


class Landed:
    """A step that has ended."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        """There is nothing to wait for."""
        return self._result
