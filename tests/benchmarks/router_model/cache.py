"""A replica's KV cache in the simple model: least recently used blocks go, to host memory first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence


class Lru:
    """Block numbers, bounded."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def touch(self, blocks: Iterable[int]) -> list[int]:
        """Have `blocks`, as the last ones used; those that had to go for them."""
        held = self._blocks
        for block in blocks:
            held[block] = None
            held.move_to_end(block)
        return [held.popitem(last=False)[0] for _ in range(len(held) - self._capacity)]

    def leading(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are there before the first that is not."""
        for count, block in enumerate(blocks):
            if block not in self._blocks:
                return count
        return len(blocks)


class Cache:
    """Device, and host memory for what is evicted from it (`host_blocks` of 0: none).

    `node_host` counts the copies in host memory of the whole node: all its replicas read them.
    """

    def __init__(self, device_blocks: int, host_blocks: int, node_host: Counter[int]) -> None:
        self.device = Lru(device_blocks)
        self.changes: list[tuple[str, int]] = []
        """(kind of event, block) since they were last taken."""
        self._host = Lru(host_blocks)
        self._node_host = node_host

    def hits(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Leading blocks on the device, and those after them in host memory."""
        device = end = self.device.leading(blocks)
        while end < len(blocks) and blocks[end] in self._node_host:
            end += 1
        return device, end - device

    def use(self, blocks: Sequence[int]) -> None:
        """A request with these blocks is computed."""
        stored = [block for block in blocks if block not in self.device]
        evicted = self.device.touch(blocks)
        spilt = [block for block in evicted if block not in self._host]
        dropped = self._host.touch(evicted)
        self._node_host.update(spilt)
        self._forget(dropped)
        self.changes += [("stored", block) for block in stored]
        self.changes += [("removed", block) for block in evicted]
        self.changes += [("offloaded", block) for block in spilt]
        self.changes += [("dropped", block) for block in dropped]

    def leave(self) -> None:
        """The replica has gone, its host memory too: the worst case."""
        self._forget(self._host)

    def _forget(self, dropped: Iterable[int]) -> None:
        for block in dropped:
            self._node_host[block] -= 1
            if not self._node_host[block]:
                del self._node_host[block]
