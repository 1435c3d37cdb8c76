"""What the engine asks of a GPU beside running kernels; tests have one without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Queue it again, on the same memory."""
        ...


class Event(Protocol):
    """A point in the device's queue."""

    def wait(self) -> None:
        """Block the host until the device has passed it."""
        ...


class Device(Protocol):
    """One GPU and its queue of work, in which everything is done in order."""

    name: str
    """As torch calls it."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory, uint8 [num_bytes], that the device reads and writes by itself."""
        ...

    def mark(self) -> Event:
        """The end of what is queued by now."""
        ...

    def beside(self, event: Event) -> AbstractContextManager[object]:
        """Within it, work is queued beside the main queue, behind `event`."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """A graph of `work`, which must give the device nothing but kernels and copies on the
        device. Runs it first, so that what is compiled or allocated once does not get into it.

        Raises:
            CaptureError: `work` waits for the device.
        """
        ...


class CaptureError(RuntimeError):
    """Work cannot be captured as a graph; the message says why."""
