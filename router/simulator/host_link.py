"""Copies between a simulated device and host memory: they take time and move nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from replicas.core.block_transfer import EndedCopy, Restore, Save


class HostLink:
    """A queue each way. A copy begins when those before it have ended, beside the steps."""

    def __init__(self, copy_s: float, intact: Callable[[Restore], bool] = lambda _: True) -> None:
        """`copy_s` is what one block takes, in seconds; `intact` says at a restore's end whether
        it read the block it was to read."""
        self._copy_s = copy_s
        self._intact = intact
        self._saves: deque[tuple[float, Save | Restore]] = deque()
        self._restores: deque[tuple[float, Save | Restore]] = deque()

    def start(self, copies: Sequence[Save | Restore], now: float) -> None:
        """Queue copies in their order."""
        for copy in copies:
            lane = self._saves if isinstance(copy, Save) else self._restores
            begins = max(now, lane[-1][0]) if lane else now
            lane.append((begins + self._copy_s, copy))

    def next_end(self) -> float | None:
        """When the next copy ends; None where none is under way."""
        ends = [lane[0][0] for lane in (self._saves, self._restores) if lane]
        return min(ends, default=None)

    def ended(self, now: float) -> list[EndedCopy]:
        """Copies that ended by `now` and were not given before."""
        done = []
        for lane in (self._saves, self._restores):
            while lane and lane[0][0] <= now:
                copy = lane.popleft()[1]
                ok = isinstance(copy, Save) or self._intact(copy)
                done.append(EndedCopy(copy, ok, self._copy_s))
        return done
