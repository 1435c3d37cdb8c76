"""Copies that run beside the step, many blocks at a time, through pinned memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.block_moves import BlockMoves
from replicas.core.block_transfer import EndedCopy, Restore, Save
from replicas.engine.kv_pool import KVPool
from replicas.host_store import HostStore

_IDS = torch.int64
CHUNK_BYTES = 1 << 26
"""That one copy takes over the bus: large enough for all of its bandwidth."""
_STAGINGS = 2
"""On the device: one is filled or emptied there while the bus has the other."""
_RING = 4
"""Chunks of pinned memory."""


class Mark(Protocol):
    """A point in a queue."""

    def is_done(self) -> bool:
        """Whether the device has passed it."""
        ...


class Queue(Protocol):
    """One of a device's queues of work; each does its work in order."""

    def queueing(self) -> AbstractContextManager[object]:
        """Within it, work is queued here."""
        ...

    def mark(self) -> Mark:
        """The end of what is queued here by now."""
        ...

    def wait_for(self, mark: Any) -> None:
        """Whatever is queued here from now on begins after another queue's mark."""
        ...


class CopyQueues(Protocol):
    """What a device does beside compute."""

    @property
    def kernels(self) -> Queue:
        """For work on the device."""
        ...

    @property
    def bus(self) -> Queue:
        """For copies between device and host."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory, uint8 [num_bytes], that the device reads and writes by itself."""
        ...

    def wait_for_compute(self) -> None:
        """Whatever is queued on either from now on begins after what compute has queued so far."""
        ...

    def sleep(self, timeout_s: float) -> None:
        """Wait until more of it has been done, but not much longer than that."""
        ...


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Pinned memory for some blocks."""

    blocks: Tensor
    """uint8 [blocks, block_bytes]."""
    ids: Tensor
    """[blocks] int64."""


@dataclass(slots=True)
class _Staging:
    """Device memory for as many blocks."""

    blocks: Tensor
    """[blocks, ...], as in the pool."""
    ids: Tensor
    """[blocks] int64."""
    free: Mark | None = None
    """The end of what used it last."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    copies: Sequence[Save | Restore]
    chunk: _Chunk
    begin: float
    end: Mark


class StagedCopier:
    """A HostCopier for devices that copy and compute at once.

    Copies go in chunks of blocks, all in one direction: a kernel gathers the blocks into one of
    two staging buffers on the device, or scatters them out of it, and one copy takes the chunk
    between there and a ring of pinned memory. A chunk of the ring belongs to its copies from their
    start to their end; copies that find none wait, in order. Blocks wait with them, untouched: the
    scheduler sees to that. A save is sealed, and its block reported free, when the device has read
    the block and the bytes have gone on from the ring to the store.
    """

    def __init__(
        self,
        pool: KVPool,
        store: HostStore,
        clock: Callable[[], float],
        queues: CopyQueues,
        moves: BlockMoves,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """`chunk_bytes` are rounded down to blocks, one at the least."""
        self._pool = pool
        self._store = store
        self._clock = clock
        self._queues = queues
        self._moves = moves
        self._room = max(1, chunk_bytes // pool.block_bytes)
        self._free = deque(self._pinned() for _ in range(_RING))
        self._stagings = deque(self._staging() for _ in range(_STAGINGS))
        self._queue: deque[Save | Restore] = deque()
        self._under_way: deque[_UnderWay] = deque()
        self._failed: list[EndedCopy] = []
        self._ended_at = 0.0

    def start(self, copies: Sequence[Save | Restore]) -> None:
        """Queue them behind what compute has been given so far."""
        if copies:
            self._queues.wait_for_compute()
            self._queue.extend(copies)
            self._fill_ring()

    def ended(self) -> list[EndedCopy]:
        """The copies that have ended since the last call; never waits."""
        ended, self._failed = self._failed, []
        while self._under_way and self._under_way[0].end.is_done():
            ended += self._end(self._under_way.popleft())
        self._fill_ring()
        return ended

    def wait(self, timeout_s: float) -> None:
        """Sleep for as long as the first copies are under way, up to `timeout_s`."""
        if self._under_way and not self._failed:
            self._queues.sleep(timeout_s)

    def _pinned(self) -> _Chunk:
        blocks = self._queues.pinned(self._room * self._pool.block_bytes)
        return _Chunk(blocks.view(self._room, -1), self._queues.pinned(8 * self._room).view(_IDS))

    def _staging(self) -> _Staging:
        blocks = self._pool.blocks
        shape = (self._room, *blocks.shape[1:])
        staging = torch.empty(shape, dtype=blocks.dtype, device=blocks.device)
        return _Staging(staging, torch.empty(self._room, dtype=_IDS, device=blocks.device))

    def _fill_ring(self) -> None:
        while self._queue and self._free:
            begin = self._clock()
            chunk = self._free.popleft()
            copies = self._next(chunk)
            if not copies:  # none of those that were to be restored was found
                self._free.append(chunk)
                continue
            end = self._launch(copies, chunk)
            self._under_way.append(_UnderWay(copies, chunk, begin, end))

    def _next(self, chunk: _Chunk) -> list[Save | Restore]:
        """The next copies of one direction that fit a chunk; what is to be restored is in it."""
        kind = type(self._queue[0])
        copies: list[Save | Restore] = []
        while self._queue and len(copies) < self._room and type(self._queue[0]) is kind:
            copy = self._queue.popleft()
            if isinstance(copy, Restore) and not self._fetch(copy, chunk.blocks[len(copies)]):
                continue
            chunk.ids[len(copies)] = copy.block
            copies.append(copy)
        return copies

    def _fetch(self, restore: Restore, into: Tensor) -> bool:
        begin = self._clock()
        content = self._store.fetch(restore.source, restore.digest)
        if content is None:
            self._failed.append(EndedCopy(restore, ok=False, seconds=self._clock() - begin))
            return False
        into.copy_(content)
        return True

    def _launch(self, copies: Sequence[Save | Restore], chunk: _Chunk) -> Mark:
        """Queue a chunk; gives its end."""
        count = len(copies)
        self._stagings.rotate()
        staging = self._stagings[0]
        ids, pinned = staging.ids[:count], chunk.blocks[:count]
        raw = staging.blocks.view(self._room, -1).view(torch.uint8)[:count]
        kernels, bus, pool = self._queues.kernels, self._queues.bus, self._pool.blocks
        if isinstance(copies[0], Save):
            with _behind(kernels, staging.free):
                ids.copy_(chunk.ids[:count], non_blocking=True)
                self._moves.gather(pool, ids, staging.blocks)
            with _behind(bus, kernels.mark()):
                pinned.copy_(raw, non_blocking=True)
            staging.free = bus.mark()
        else:
            with _behind(bus, staging.free):
                raw.copy_(pinned, non_blocking=True)
            with _behind(kernels, bus.mark()):
                ids.copy_(chunk.ids[:count], non_blocking=True)
                self._moves.scatter(staging.blocks, ids, pool)
            staging.free = kernels.mark()
        return staging.free

    def _end(self, done: _UnderWay) -> list[EndedCopy]:
        for content, copy in zip(done.chunk.blocks, done.copies, strict=False):
            if isinstance(copy, Save):
                self._store.begin(copy.slot).copy_(content)
                self._store.seal(copy.slot, copy.digest)
        self._free.append(done.chunk)
        # What was queued behind another chunk began when that had ended.
        now = self._clock()
        seconds = (now - max(done.begin, self._ended_at)) / len(done.copies)
        self._ended_at = now
        return [EndedCopy(copy, ok=True, seconds=seconds) for copy in done.copies]


def _behind(queue: Queue, mark: Mark | None) -> AbstractContextManager[object]:
    """Queue work on `queue` that begins after `mark`."""
    if mark is not None:
        queue.wait_for(mark)
    return queue.queueing()
