"""How long a step that only decodes takes, and what one more choice adds to it."""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.98
"""An observation's weight halves with the 34 that come after it."""
_RECENT = 0.2
_PRIOR_VARIANCE = 1.0
"""Batches that differ by less than a choice or so say little on what a choice adds."""
_PRIOR_BATCH = 64.0
"""Until batches have differed: a step of so many choices takes twice as long as one of none."""


@dataclass(slots=True)
class StepTime:
    """A line through recent (choices, seconds), by least squares over decayed sums."""

    seconds: float = 0.0
    """Of recent steps; 0 before there was one."""
    _weight: float = 0.0
    _choices: float = 0.0
    _seconds: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0

    def observe(self, choices: int, seconds: float) -> None:
        """A step decoded so many choices in so many seconds."""
        self.seconds += (seconds - self.seconds) * (_RECENT if self._weight else 1.0)
        self._weight = self._weight * _DECAY + 1.0
        self._choices = self._choices * _DECAY + choices
        self._seconds = self._seconds * _DECAY + seconds
        self._squares = self._squares * _DECAY + choices * choices
        self._products = self._products * _DECAY + choices * seconds

    @property
    def per_choice(self) -> float:
        """Seconds that one more choice adds to a step; 0 before there was one."""
        if not self._weight:
            return 0.0
        choices, seconds = self._choices / self._weight, self._seconds / self._weight
        variance = max(0.0, self._squares / self._weight - choices * choices)
        covariance = self._products / self._weight - choices * seconds
        prior = seconds / (_PRIOR_BATCH + choices)
        slope = (covariance + _PRIOR_VARIANCE * prior) / (variance + _PRIOR_VARIANCE)
        return max(0.0, slope)

    def of(self, choices: int) -> float:
        """Seconds that a step of so many choices is expected to take."""
        if not self._weight:
            return 0.0
        mean = self._choices / self._weight
        return max(0.0, self._seconds / self._weight + self.per_choice * (choices - mean))
