"""Blocks that a replica will have, as a request that needs them is on its way there."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from router.prefix_index import NO_HIT, PrefixIndex

LATE_S = 10.0
"""How long after the time foreseen for it a block is still expected."""


@dataclass(slots=True)
class _Expectation:
    call_id: str
    replica: str
    chain: Sequence[bytes]
    known: int
    """Blocks of the chain that are there, or that another call brings; the rest this one brings."""
    deadline: float

    @property
    def anchor(self) -> bytes:
        """The block that what this call brings follows on, where it knows any."""
        return self.chain[self.known - 1]


class Expectations:
    """Speculative entries of the index, by call.

    An entry ends when the replica says that it stored the block, with its deadline at the
    latest. Without them requests of one prefix that come at one moment would each be taken for
    the first. Of such calls the first brings the prefix; if it ends too early, the next one does.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._by_call: dict[str, _Expectation] = {}
        self._anchored: dict[str, dict[bytes, dict[str, _Expectation]]] = {}
        """By replica, anchor and call: those that know some blocks."""
        self._deadlines: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._by_call)

    def expect(
        self, call_id: str, replica: str, chain: Sequence[bytes], deadline: float, known: int = 0
    ) -> None:
        """`replica` will have the blocks of `chain`, the first `known` of which it has or is
        expected to have already, until `deadline`; instead of what was expected of this call
        before. `chain` is kept and must not change."""
        self.cancel(call_id)
        if chain:
            expected = _Expectation(call_id, replica, chain, known, deadline)
            self._by_call[call_id] = expected
            self._cast_anchor(expected)
            heapq.heappush(self._deadlines, (deadline, call_id))
            self._index.expect(replica, chain[known:])

    def cancel(self, call_id: str) -> None:
        """The call does not go there; unknown ones are fine."""
        found = self._by_call.pop(call_id, None)
        if found is None:
            return
        self._weigh_anchor(found)
        kept = self._pass_on(found)
        self._index.unexpect(found.replica, found.chain[kept:])

    def move(self, call_id: str, replica: str, deadline: float) -> None:
        """The call has gone to another replica than was thought."""
        found = self._by_call.get(call_id)
        if found is not None and found.replica != replica:
            there = self._index.match(found.chain).get(replica, NO_HIT)
            self.expect(call_id, replica, found.chain, deadline, there.device)

    def expire(self, now: float) -> None:
        """Forget what has not come in time."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, call_id = heapq.heappop(self._deadlines)
            found = self._by_call.get(call_id)
            if found is not None and found.deadline <= now:
                self.cancel(call_id)

    def _pass_on(self, left: _Expectation) -> int:
        """Of the calls that follow on what a call was to bring, one that shares the most with it
        brings that now. Gives how many blocks of the chain somebody still counts on."""
        anchored = self._anchored.get(left.replica, {})
        deepest = next(filter(anchored.__contains__, reversed(left.chain[left.known :])), None)
        if deepest is None:
            return left.known
        heir = next(iter(anchored[deepest].values()))
        kept = heir.known
        self._weigh_anchor(heir)
        heir.known = left.known
        self._cast_anchor(heir)
        return kept

    def _cast_anchor(self, expected: _Expectation) -> None:
        if expected.known:
            anchored = self._anchored.setdefault(expected.replica, {})
            anchored.setdefault(expected.anchor, {})[expected.call_id] = expected

    def _weigh_anchor(self, expected: _Expectation) -> None:
        if expected.known:
            anchored = self._anchored[expected.replica]
            calls = anchored[expected.anchor]
            del calls[expected.call_id]
            if not calls:
                del anchored[expected.anchor]
            if not anchored:
                del self._anchored[expected.replica]
