"""What copies between device and host did to the choices, the books and the measured rates."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.core.block_transfer import EndedCopy, Restore, Save
from replicas.core.kv_manager import KVManager
from replicas.core.preemption.ledger import ResumeLedger
from replicas.core.request import Choice
from replicas.core.scheduler_stats import SchedulerStats


class HostTraffic:
    """Takes in ended copies: arrivals go to those who wait for them, costs to whoever caused
    them, times to the cost model."""

    def __init__(self, kv: KVManager, resumes: ResumeLedger, stats: SchedulerStats) -> None:
        self._kv = kv
        self._costs = kv.costs
        self._resumes = resumes
        self._stats = stats
        self._late: set[int] = set()
        """Blocks of restores under way that nobody waits for any more, counted as failed."""

    def end(
        self,
        ended: Sequence[EndedCopy],
        running: Sequence[Choice],
        waiting: Sequence[Choice],
        now: float,
    ) -> None:
        """Take in copies that ended, well or not."""
        restored = {each.copy.block: each for each in ended if isinstance(each.copy, Restore)}
        for choice in running if restored else ():
            for block in choice.arriving.keys() & restored.keys():
                self._take_arrival(choice, restored[block], now)
        self._charge_saves(ended, waiting)
        self._observe(ended)
        self._kv.end_copies(ended)

    def late(self, running: Sequence[Choice], now: float) -> list[Choice]:
        """Choices whose restore has taken too long; their next admission computes instead."""
        late = [choice for choice in running if choice.arriving and now > choice.arrival_deadline]
        for choice in late:
            self._stats.failed_copies += len(choice.arriving)
            self._late |= choice.arriving.keys()
            self._costs.observe_read(0, 0.0, lost=len(choice.arriving))
            choice.shuns_host = True
        return late

    def note_ready(self, choice: Choice, now: float) -> None:
        """The choice can compute: what it waited for since a preemption is over."""
        choice.shuns_host = False
        self._resumes.end_stall(choice, now)

    def _take_arrival(self, choice: Choice, ended: EndedCopy, now: float) -> None:
        if choice.resume is not None:
            choice.resume.actual_s += ended.seconds
        before = choice.num_computed_tokens
        if self._kv.take_arrival(choice, ended.copy.block, ok=ended.ok):
            self._note_restored(choice, choice.num_computed_tokens - before)
            self.note_ready(choice, now)

    def _note_restored(self, choice: Choice, num_tokens: int) -> None:
        if choice.returns:
            choice.restored_tokens += num_tokens
            self._stats.restored_tokens += num_tokens
        elif choice.index == 0:
            choice.host_cached_tokens = num_tokens
            self._stats.host_cache_hits += num_tokens

    def _charge_saves(self, ended: Sequence[EndedCopy], waiting: Sequence[Choice]) -> None:
        """What was written for a preempted choice is part of what its preemption cost."""
        seconds = {each.copy.digest: each.seconds for each in ended if isinstance(each.copy, Save)}
        for choice in waiting if seconds else ():
            if choice.resume is not None:
                digests = choice.host_blocks & seconds.keys()
                choice.resume.actual_s += sum(seconds.pop(digest) for digest in digests)

    def _observe(self, ended: Sequence[EndedCopy]) -> None:
        good = [each for each in ended if each.ok]
        bad = [each for each in ended if not each.ok and each.copy.block not in self._late]
        self._late -= {each.copy.block for each in ended}
        saves = [each.seconds for each in good if isinstance(each.copy, Save)]
        restores = [each.seconds for each in good if isinstance(each.copy, Restore)]
        lost_saves = sum(1 for each in bad if isinstance(each.copy, Save))
        self._costs.observe_write(len(saves), sum(saves), lost_saves)
        self._costs.observe_read(len(restores), sum(restores), len(bad) - lost_saves)
        self._stats.written_bytes += len(saves) * self._costs.block_bytes
        self._stats.read_bytes += len(restores) * self._costs.block_bytes
        self._stats.failed_copies += len(bad)
