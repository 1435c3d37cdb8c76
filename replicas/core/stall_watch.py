"""Tells of preempted requests how long they will wait, so that they may go on elsewhere."""

from __future__ import annotations

from replicas.core.request import Choice, ChoiceState
from replicas.core.scheduler import Scheduler
from replicas.protocol import TokenDelta

PERIOD_S = 1.0
"""Between two tellings of one wait: the load elsewhere changes, too."""


class StallWatch:
    """Looks at the queue after each step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def look(self, now: float) -> list[TokenDelta]:
        """A delta without tokens for the first waiting choice of each request that had begun and
        of which nothing runs now: with its receipt so far and the expected wait."""
        deltas = []
        blocks = 0
        for choice in self._scheduler.waiting:
            blocks += self._scheduler.kv.blocks_for(choice.num_known_tokens + 1)
            if self._is_due(choice, now):
                choice.wait_told_at = now
                deltas.append(
                    TokenDelta(
                        choice.request.id,
                        choice.index,
                        (),
                        receipt=choice.receipt(),
                        wait_s=self._wait_s(blocks),
                    )
                )
        return deltas

    def _is_due(self, choice: Choice, now: float) -> bool:
        if choice.preempted_at is None or not choice.output_token_ids:
            return False
        told_at = choice.wait_told_at
        if told_at is not None and now - told_at < PERIOD_S:
            return False
        live = choice.request.live_choices()
        return live[0] is choice and all(each.state is ChoiceState.WAITING for each in live)

    def _wait_s(self, blocks: int) -> float:
        """Until `blocks` are free: running choices end in the order of what they have to come,
        a token a step."""
        scheduler = self._scheduler
        free, steps = scheduler.kv.pool.num_free, 0.0
        ends = sorted((scheduler.admission.remaining(c), len(c.blocks)) for c in scheduler.running)
        for remaining, held in ends:
            if free >= blocks:
                break
            free += held
            steps = remaining
        return steps * scheduler.costs.decode.seconds
