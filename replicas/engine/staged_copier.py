"""Copies that run beside the step, through a ring of pinned buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from replicas.core.block_transfer import EndedCopy, Restore, Save
from replicas.engine.kv_pool import KVPool
from replicas.host_store import HostStore


class CopyStream(Protocol):
    """A device's second queue of work."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory, uint8 [num_bytes], that the device reads and writes by itself."""
        ...

    def wait_for_compute(self) -> None:
        """Whatever is queued here from now on begins after what compute has queued so far."""
        ...

    def queueing(self) -> AbstractContextManager[object]:
        """Within it, copies are queued here."""
        ...

    def mark(self) -> Callable[[], bool]:
        """A question: has all that is queued here by now been done?"""
        ...

    def sleep(self, timeout_s: float) -> None:
        """Wait until more of it has been done, but not much longer than that."""
        ...


@dataclass(frozen=True, slots=True)
class _UnderWay:
    copy: Save | Restore
    buffer: int
    begin: float
    is_done: Callable[[], bool]


class StagedCopier:
    """A HostCopier for devices that copy and compute at once.

    Each copy has a pinned buffer of the ring to itself from its start to its end; those that
    find none wait, in order. Blocks wait with them, untouched: the scheduler sees to that. A
    save is sealed, and its block reported free, when the device has read the block and the
    bytes have gone on from the buffer to the store.
    """

    def __init__(
        self,
        pool: KVPool,
        store: HostStore,
        clock: Callable[[], float],
        stream: CopyStream,
        ring_bytes: int = 2**27,
    ) -> None:
        """`ring_bytes` of pinned memory, two blocks at the least."""
        self._pool = pool
        self._store = store
        self._clock = clock
        self._stream = stream
        buffers = max(2, ring_bytes // pool.block_bytes)
        self._ring = [stream.pinned(pool.block_bytes) for _ in range(buffers)]
        self._free = deque(range(buffers))
        self._queue: deque[Save | Restore] = deque()
        self._under_way: deque[_UnderWay] = deque()
        self._failed: list[EndedCopy] = []

    def start(self, copies: Sequence[Save | Restore]) -> None:
        """Queue them behind what compute has been given so far."""
        if copies:
            self._stream.wait_for_compute()
            self._queue.extend(copies)
            self._fill_ring()

    def ended(self) -> list[EndedCopy]:
        """The copies that have ended since the last call; never waits."""
        ended, self._failed = self._failed, []
        # One stream does its work in order: behind one that is not done, none is.
        while self._under_way and self._under_way[0].is_done():
            ended.append(self._end(self._under_way.popleft()))
        self._fill_ring()
        return ended

    def wait(self, timeout_s: float) -> None:
        """Sleep for as long as the first copy is under way, up to `timeout_s`."""
        if self._under_way and not self._failed:
            self._stream.sleep(timeout_s)

    def _fill_ring(self) -> None:
        while self._queue and self._free:
            copy, buffer = self._queue.popleft(), self._free.popleft()
            begin = self._clock()
            if not self._launch(copy, buffer):
                self._free.append(buffer)
                self._failed.append(EndedCopy(copy, ok=False, seconds=self._clock() - begin))
                continue
            self._under_way.append(_UnderWay(copy, buffer, begin, self._stream.mark()))

    def _launch(self, copy: Save | Restore, buffer: int) -> bool:
        staging = self._ring[buffer]
        if isinstance(copy, Save):
            with self._stream.queueing():
                self._pool.export(copy.block, staging)
            return True
        content = self._store.fetch(copy.source, copy.digest)
        if content is None:
            return False
        staging.copy_(content)
        with self._stream.queueing():
            self._pool.load(copy.block, staging)
        return True

    def _end(self, done: _UnderWay) -> EndedCopy:
        copy = done.copy
        if isinstance(copy, Save):
            self._store.begin(copy.slot).copy_(self._ring[done.buffer])
            self._store.seal(copy.slot, copy.digest)
        self._free.append(done.buffer)
        return EndedCopy(copy, ok=True, seconds=self._clock() - done.begin)
