"""Decode steps as graphs, one for each batch size of a few."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.engine.array_layout import Array, ArrayLayout
from replicas.engine.device import Device, Graph
from replicas.engine.graph_buckets import bucket_for


@dataclass(frozen=True, slots=True)
class CapturedBucket:
    """One batch size."""

    rows: int
    layout: ArrayLayout
    """Of a step's arrays in `DecodeGraphs.inputs`, from its beginning."""
    graph: Graph
    work: Callable[[], None]
    """What was captured: it holds the memory that the graph uses."""


class DecodeGraphs:
    """Graphs that read their inputs from the same memory: one runs at a time."""

    def __init__(self, device: Device, room: int) -> None:
        """`room` are bytes for a graph's inputs and what goes to the device along with them."""
        self.inputs = torch.zeros(room, dtype=torch.uint8, device=device.name)
        self._device = device
        self._captured: dict[int, CapturedBucket] = {}

    @property
    def sizes(self) -> Sequence[int]:
        """Captured batch sizes, ascending."""
        return sorted(self._captured)

    def capture(
        self,
        rows: int,
        arrays: Mapping[str, Array],
        prepare: Callable[[Mapping[str, Tensor]], Callable[[], None]],
    ) -> None:
        """Capture a batch size: to be called for the largest first, whose memory the others use.

        `arrays` are those of a step of nothing but padding; `prepare` makes the work to capture
        from their tensors.

        Raises:
            CaptureError: the work waits for the device.
        """
        layout = ArrayLayout.of(arrays)
        host = torch.zeros(layout.end, dtype=torch.uint8)
        layout.write(arrays, host.numpy())
        self.inputs[: layout.end].copy_(host)
        work = prepare(layout.tensors(self.inputs))
        self._captured[rows] = CapturedBucket(rows, layout, self._device.capture(work), work)

    def bucket(self, num_rows: int) -> CapturedBucket | None:
        """The one for a batch of `num_rows`; None where it is to be computed without a graph."""
        rows = bucket_for(num_rows, self.sizes)
        return None if rows is None else self._captured[rows]
