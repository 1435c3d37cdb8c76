"""CUDA streams for copies between device and host."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch
from torch import Tensor

_NAP_S = 0.0002


class CudaMark:
    """An event on a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def is_done(self) -> bool:
        """Ask the event."""
        return self.event.query()


class CudaQueue:
    """A `Queue`: one stream."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.last: CudaMark | None = None

    def queueing(self) -> AbstractContextManager[object]:
        """Work within goes to this stream."""
        return torch.cuda.stream(self.stream)

    def mark(self) -> CudaMark:
        """Record an event."""
        self.last = CudaMark(self.stream)
        return self.last

    def wait_for(self, mark: CudaMark) -> None:
        """Order what follows behind an event; the host goes on."""
        self.stream.wait_event(mark.event)


class CudaCopyQueues:
    """`CopyQueues` beside the current stream of the current device."""

    def __init__(self) -> None:
        self.kernels = CudaQueue()
        self.bus = CudaQueue()

    def pinned(self, num_bytes: int) -> Tensor:
        """Page-locked memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def wait_for_compute(self) -> None:
        """Order both streams behind the current one."""
        for queue in (self.kernels, self.bus):
            queue.stream.wait_stream(torch.cuda.current_stream())

    def sleep(self, timeout_s: float) -> None:
        """Look every so often whether everything has been done."""
        deadline = time.monotonic() + timeout_s
        while not self._is_idle() and time.monotonic() < deadline:
            time.sleep(_NAP_S)

    def _is_idle(self) -> bool:
        marks = (queue.last for queue in (self.kernels, self.bus))
        return all(mark is None or mark.is_done() for mark in marks)
