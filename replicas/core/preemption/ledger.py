"""What preemptions cost: as predicted, and as measured until their choices had caught up."""

from __future__ import annotations

from replicas.core.cost_model import CostModel
from replicas.core.request import Choice
from replicas.core.scheduler_output import ResumeCost


class ResumeLedger:
    """Tells of each preemption once: when its choice draws its next token, or else when it is
    preempted anew or ends."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._closed: list[ResumeCost] = []

    def note_admission(self, choice: Choice) -> None:
        """A choice got blocks: learn how many of its own it found on the device."""
        resume = choice.resume
        if resume is not None and resume.own_blocks:
            found = choice.num_found_blocks - resume.shared_blocks
            self._costs.found.observe(resume.own_blocks, min(max(0, found), resume.own_blocks))
            resume.own_blocks = 0  # a second admission would find what the first one made

    def end_stall(self, choice: Choice, now: float) -> None:
        """What the choice waited for since a preemption, if ever, is over."""
        if choice.preempted_at is None or choice.resume is None:
            return
        choice.resume.stall_s = now - choice.preempted_at
        choice.stall_s += choice.resume.stall_s
        choice.preempted_at = None

    def close(self, choice: Choice, now: float, *, caught_up: bool) -> None:
        """The last preemption will cost the choice no more; fine where there was none."""
        self.end_stall(choice, now)
        resume, choice.resume = choice.resume, None
        if resume is not None:
            self._closed.append(
                ResumeCost(
                    key=choice.key,
                    swapped=resume.swapped,
                    predicted_s=resume.predicted_s,
                    actual_s=resume.actual_s,
                    stall_s=resume.stall_s,
                    caught_up=caught_up,
                )
            )

    def take(self) -> tuple[ResumeCost, ...]:
        """The preemptions closed since the last call."""
        closed = tuple(self._closed)
        self._closed.clear()
        return closed
