"""Blocks that a replica will have, as a request that needs them is on its way there."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from router.holders import Tier
from router.prefix_index import PrefixIndex

LATE_S = 10.0
"""How long after the time foreseen for it a block is still expected."""


@dataclass(frozen=True, slots=True)
class _Expectation:
    replica: str
    digests: tuple[bytes, ...]
    deadline: float


class Expectations:
    """Speculative entries of the index, by call.

    An entry ends when the replica says that it stored the block, with its deadline at the
    latest. Without them requests of one prefix that come at one moment would each be taken for
    the first.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._by_call: dict[str, _Expectation] = {}
        self._deadlines: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._by_call)

    def expect(self, call_id: str, replica: str, digests: Sequence[bytes], deadline: float) -> None:
        """`replica` will have these blocks until `deadline`; instead of what was expected of this
        call before."""
        self.cancel(call_id)
        if digests:
            self._by_call[call_id] = _Expectation(replica, tuple(digests), deadline)
            heapq.heappush(self._deadlines, (deadline, call_id))
            self._index.store(replica, digests, Tier.EXPECTED)

    def cancel(self, call_id: str) -> None:
        """The call does not go there; unknown ones are fine."""
        found = self._by_call.pop(call_id, None)
        if found is not None:
            self._index.remove(found.replica, found.digests, Tier.EXPECTED)

    def move(self, call_id: str, replica: str, deadline: float) -> None:
        """The call has gone to another replica than was thought."""
        found = self._by_call.get(call_id)
        if found is not None and found.replica != replica:
            self.expect(call_id, replica, found.digests, deadline)

    def expire(self, now: float) -> None:
        """Forget what has not come in time."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, call_id = heapq.heappop(self._deadlines)
            found = self._by_call.get(call_id)
            if found is not None and found.deadline <= now:
                self.cancel(call_id)
