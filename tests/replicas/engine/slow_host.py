"""Host memory that takes its time, or fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from replicas.core.block_transfer import EndedCopy, Location, Restore, Save
from replicas.engine.host_copier import DirectCopier
from replicas.engine.host_memory import MakeCopier
from replicas.engine.kv_pool import KVPool
from replicas.host_store import HostStore, InProcessStore


class SlowCopier:
    """Ends each copy a number of steps after it was started, and copies only then: who frees or
    overwrites a block too early spoils its content."""

    def __init__(self, inner: DirectCopier, steps: int) -> None:
        self._inner = inner
        self._steps = steps
        self._waiting: list[tuple[int, Save | Restore]] = []

    def start(self, copies: Sequence[Save | Restore]) -> None:
        self._waiting += [(self._steps, copy) for copy in copies]

    def ended(self) -> list[EndedCopy]:
        self._inner.start([copy for left, copy in self._waiting if left == 0])
        self._waiting = [(left - 1, copy) for left, copy in self._waiting if left]
        return self._inner.ended()

    def wait(self, timeout_s: float) -> None:
        """The steps that follow are all it waits for."""


def slow(steps: int) -> MakeCopier:
    """Copies that take `steps` steps."""

    def make(pool: KVPool, store: HostStore, clock: Callable[[], float]) -> SlowCopier:
        return SlowCopier(DirectCopier(pool, store, clock), steps)

    return make


class ThrottledCopier:
    """Says that copies took as long as at `bytes_per_s`: what the cost model then believes."""

    def __init__(self, inner: DirectCopier, block_bytes: int, bytes_per_s: float) -> None:
        self._inner = inner
        self._seconds = block_bytes / bytes_per_s

    def start(self, copies: Sequence[Save | Restore]) -> None:
        self._inner.start(copies)

    def ended(self) -> list[EndedCopy]:
        return [EndedCopy(each.copy, each.ok, self._seconds) for each in self._inner.ended()]

    def wait(self, timeout_s: float) -> None:
        """Nothing is under way."""


def throttled(bytes_per_s: float) -> MakeCopier:
    """Copies that claim to have run at this rate."""

    def make(pool: KVPool, store: HostStore, clock: Callable[[], float]) -> ThrottledCopier:
        return ThrottledCopier(DirectCopier(pool, store, clock), pool.block_bytes, bytes_per_s)

    return make


cheap = throttled(1e15)
"""For tests of what is copied where that costs less than computing: here a block of a tiny model
may be computed as fast as it is copied."""


class ForgetfulStore(InProcessStore):
    """Every `period`-th block that is fetched is gone."""

    def __init__(self, num_slots: int, block_bytes: int, period: int) -> None:
        super().__init__(num_slots, block_bytes)
        self._period = period
        self.fetched = 0

    def fetch(self, source: Location, digest: bytes) -> Tensor | None:
        self.fetched += 1
        return None if self.fetched % self._period == 0 else super().fetch(source, digest)
