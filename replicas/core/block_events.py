"""What became findable on a replica, and what ceased to be, since somebody last asked."""

from __future__ import annotations

from enum import Enum, auto

from replicas.protocol import BlockEvents


class _Device(Enum):
    STORED = auto()
    RESTORED = auto()
    REMOVED = auto()


class BlockEventLog:
    """The changes of the pool's and the host tier's tables, netted.

    Only the last event of a digest in a tier counts, so that a log that nobody takes holds no
    more than one entry for each digest that changed. Replayed over what was findable at the last
    `take`, the events of the next one give what is findable now.
    """

    def __init__(self) -> None:
        self._device: dict[bytes, _Device] = {}
        self._readable: dict[bytes, bool] = {}
        self._cleared = False

    def stored(self, digest: bytes) -> None:
        """A computed block can be found on the device."""
        self._device[digest] = _Device.STORED

    def restored(self, digest: bytes) -> None:
        """A block copied from host memory can be found on the device."""
        self._device[digest] = _Device.RESTORED

    def removed(self, digest: bytes) -> None:
        """A block cannot be found on the device any more."""
        self._device[digest] = _Device.REMOVED

    def offloaded(self, digest: bytes) -> None:
        """A block can be read from the host tier."""
        self._readable[digest] = True

    def dropped(self, digest: bytes) -> None:
        """A block cannot be read from the host tier any more."""
        self._readable[digest] = False

    def cleared(self) -> None:
        """Nothing can be found in either tier any more."""
        self._device.clear()
        self._readable.clear()
        self._cleared = True

    def take(self) -> BlockEvents:
        """What happened since the last call."""
        device, readable = self._device.items(), self._readable.items()
        events = BlockEvents(
            stored=tuple(digest for digest, last in device if last is _Device.STORED),
            restored=tuple(digest for digest, last in device if last is _Device.RESTORED),
            removed=tuple(digest for digest, last in device if last is _Device.REMOVED),
            offloaded=tuple(digest for digest, there in readable if there),
            dropped=tuple(digest for digest, there in readable if not there),
            cleared=self._cleared,
        )
        self._device.clear()
        self._readable.clear()
        self._cleared = False
        return events


class FindableBlocks:
    """The digests that can be found on a replica, kept by its events."""

    def __init__(self) -> None:
        self.device: set[bytes] = set()
        self.host: set[bytes] = set()

    def apply(self, events: BlockEvents) -> None:
        """Take in what changed."""
        if events.cleared:
            self.device.clear()
            self.host.clear()
        self.device.difference_update(events.removed)
        self.device.update(events.stored, events.restored)
        self.host.difference_update(events.dropped)
        self.host.update(events.offloaded)
