"""What a GPU's memory is taken by, and what that leaves for the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes, measured with the model loaded and its largest step run once."""

    total: int
    weights: int
    """What loading the model has allocated."""
    activations: int
    """What its largest step takes beside it, and the graphs of its decode steps."""
    others: int
    """What neither is: the driver's context, libraries, other processes."""

    def room(self, utilization: float) -> int:
        """What is left for the KV pool when all together take this share; may be negative."""
        taken = self.weights + self.activations + self.others
        return int(self.total * utilization) - taken

    def explain(self, utilization: float) -> str:
        """The same in words, for whoever set the share."""
        return (
            f"gpu_memory_utilization {utilization:g} of {_gib(self.total)} is "
            f"{_gib(self.total * utilization)}; weights take {_gib(self.weights)}, activations "
            f"{_gib(self.activations)}, the driver and others {_gib(self.others)}; what is left, "
            f"{_gib(self.room(utilization))},"
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
