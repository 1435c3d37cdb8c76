"""Pinned host memory for what goes to the device with a step and what comes back."""

from __future__ import annotations

from torch import Tensor

from replicas.engine.device import Device

_MIN_BYTES = 1 << 20


class TransferSlot:
    """The host's side of one step in flight. Its memory grows with the largest step so far."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._up = device.pinned(_MIN_BYTES)
        self._down = device.pinned(_MIN_BYTES)

    def up(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], to be written by the host."""
        self._up = self._grown(self._up, num_bytes)
        return self._up[:num_bytes]

    def down(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], to be written by the device."""
        self._down = self._grown(self._down, num_bytes)
        return self._down[:num_bytes]

    def _grown(self, memory: Tensor, num_bytes: int) -> Tensor:
        if len(memory) >= num_bytes:
            return memory
        return self._device.pinned(max(num_bytes, 2 * len(memory)))


class TransferSlots:
    """As many as there may be steps in flight."""

    def __init__(self, device: Device, count: int) -> None:
        self._free = [TransferSlot(device) for _ in range(count)]

    def take(self) -> TransferSlot:
        """One that no step uses. Raises RuntimeError where too many are in flight."""
        if not self._free:
            raise RuntimeError("a step was launched before the one before the last had ended")
        return self._free.pop()

    def give_back(self, slot: TransferSlot) -> None:
        """Its step has ended."""
        self._free.append(slot)
