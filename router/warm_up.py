"""New replicas are given work by and by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP_S = 60.0
"""From a replica's first appearance."""
FAIR_SHARES = 2.0
"""What a replica that warms up may take of the placements, in fair shares."""


@dataclass(slots=True)
class _Ramp:
    since: float
    fair: float = 0.0
    """Placements that would have been its own had all candidates got the same number."""
    taken: int = 0


class WarmUp:
    """Who came later than the others, and how much it may take.

    A replica without a queue and without a cache would otherwise draw every request that has no
    prefix anywhere. Those that were there at the first placement are as warm as any.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._ramps: dict[str, _Ramp] = {}

    def see(self, replicas: Sequence[str], now: float) -> None:
        """Candidates of a placement."""
        if self._known.issuperset(replicas):
            return
        new = set(replicas) - self._known
        if self._known:
            self._ramps.update((replica, _Ramp(now)) for replica in new)
        self._known |= new

    def held_back(self, replicas: Sequence[str], now: float) -> set[str]:
        """Those that have had their share; the rest comes first."""
        held = set[str]()
        for replica, ramp in list(self._ramps.items()):
            if now - ramp.since > WARM_UP_S:
                del self._ramps[replica]
            elif replica in replicas and ramp.taken >= 1 + FAIR_SHARES * ramp.fair:
                held.add(replica)
        return held

    def took(self, chosen: str, replicas: Sequence[str]) -> None:
        """`chosen` was placed on, of all `replicas`."""
        for replica, ramp in self._ramps.items():
            if replica in replicas:
                ramp.fair += 1 / len(replicas)
                ramp.taken += replica == chosen

    def forget(self, replica: str) -> None:
        """It has gone."""
        self._known.discard(replica)
        self._ramps.pop(replica, None)
