"""A CUDA stream for copies between device and host."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

_NAP_S = 0.0002


class CudaCopyStream:
    """A CopyStream beside the current stream of the current device."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._last: torch.cuda.Event | None = None

    def pinned(self, num_bytes: int) -> Tensor:
        """Page-locked memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def wait_for_compute(self) -> None:
        """Order copies behind the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream())

    def queueing(self) -> AbstractContextManager[object]:
        """Copies within go to this stream."""
        return torch.cuda.stream(self._stream)

    def mark(self) -> Callable[[], bool]:
        """Record an event; the answer is its query."""
        event = torch.cuda.Event()
        event.record(self._stream)
        self._last = event
        return event.query

    def sleep(self, timeout_s: float) -> None:
        """Look every so often whether everything has been done."""
        deadline = time.monotonic() + timeout_s
        while self._last is not None and not self._last.query() and time.monotonic() < deadline:
            time.sleep(_NAP_S)
