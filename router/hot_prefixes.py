"""How often prefixes are asked for."""

from __future__ import annotations

from collections import OrderedDict
from math import exp

WINDOW_S = 60.0
"""Hits fade with this time constant: their decayed sum is a number a minute."""
MAX_PREFIXES = 16_384
"""Remembered at once. The one asked for least recently goes first; at thousands of different
prefixes a minute none of those is hot."""


class HotPrefixes:
    """Hits a minute of the deepest block that a request found anywhere.

    Only that block is counted: what lies before it would have been found as well, but a copy of
    it alone would not have helped this request.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._hits: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hits)

    def per_minute(self, digest: bytes, now: float) -> float:
        """Hits of the block in the last minute, roughly."""
        hits, at = self._hits.get(digest, (0.0, now))
        return hits * exp((at - now) / WINDOW_S)

    def hit(self, digest: bytes, now: float) -> None:
        """A request found the block."""
        self._hits[digest] = (self.per_minute(digest, now) + 1.0, now)
        self._hits.move_to_end(digest)
        if len(self._hits) > self._max_prefixes:
            self._hits.popitem(last=False)
