"""How long to leave off after asking in vain."""

from __future__ import annotations

import math


class Pauses:
    """Each is twice as long as the one before, up to a bound. Times are in seconds."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.reset()

    def reset(self) -> None:
        """There is no pause now, and the next one is the first."""
        self._next_s = self._first_s
        self._ends_at = -math.inf

    def begin(self, now: float) -> None:
        """It was in vain."""
        self._ends_at = now + self._next_s
        self._next_s = min(2 * self._next_s, self._longest_s)

    def over(self, now: float) -> bool:
        """Whether it is time to ask again."""
        return now >= self._ends_at
