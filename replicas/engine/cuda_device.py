"""The current CUDA device: everything here touches torch.cuda, and nothing here decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from replicas.engine.device import CaptureError, Event, Graph


class CudaEvent:
    """An `Event` of the current stream."""

    def __init__(self) -> None:
        # A thread that waits for one that blocks does not take a core from the others.
        self.event = torch.cuda.Event(blocking=True)
        self.event.record()

    def wait(self) -> None:
        """Block until the device has passed it."""
        self.event.synchronize()


class CudaDevice:
    """A `Device`: the current device and its current stream."""

    def __init__(self) -> None:
        self.name = f"cuda:{torch.cuda.current_device()}"
        self._side = torch.cuda.Stream()
        self._capturing = torch.cuda.Stream()
        self._graph_memory = torch.cuda.graph_pool_handle()

    def pinned(self, num_bytes: int) -> Tensor:
        """Page-locked memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Event:
        """An event recorded now."""
        return CudaEvent()

    @contextmanager
    def beside(self, event: Event) -> Iterator[None]:
        """A side stream, behind `event`."""
        assert isinstance(event, CudaEvent)
        self._side.wait_event(event.event)
        with torch.cuda.stream(self._side):
            yield

    def capture(self, work: Callable[[], None]) -> Graph:
        """A torch.cuda.CUDAGraph; all graphs share their memory, as no two run at once."""
        # One stream for all runs and captures: torch and its libraries keep memory by stream.
        stream = self._capturing
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # compiles kernels and makes workspaces
            torch.cuda.synchronize()
            _refuse_waiting(work)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on using the device.
            with torch.cuda.graph(
                graph,
                pool=self._graph_memory,
                stream=stream,
                capture_error_mode="thread_local",
            ):
                work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(f"capturing them fails: {error}") from error
        return graph


def _refuse_waiting(work: Callable[[], None]) -> None:
    """Find out before the capture: one that fails leaves the device in no good state."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CaptureError(f"the model waits for the device: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
