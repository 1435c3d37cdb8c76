"""How long a step that only decodes takes, and what one more choice adds to it."""

from __future__ import annotations

from dataclasses import dataclass

_RECENT = 0.2
_GAIN = 0.05
"""Of what an observation says about the slope, the share that is believed."""
_UNKNOWN_BATCH = 64.0
"""Before anything was measured: a step of so many choices takes twice as long as one of none."""


@dataclass(slots=True)
class StepTime:
    """A line (choices, seconds) through the mean of recent steps.

    Its slope is corrected by each step, the more the further its batch is from the mean
    (normalised least mean squares): batches of one size, of which there are many in a row, leave
    it as it is.
    """

    seconds: float = 0.0
    """Of recent steps; 0 before there was one."""
    per_choice: float = 0.0
    """Seconds that one more choice adds to a step; 0 before there was one."""
    _choices: float = 0.0

    @classmethod
    def measured(cls, one_s: float, many: int, many_s: float) -> StepTime:
        """A step of a single choice took `one_s`, one of `many` choices `many_s`."""
        if many < 2:
            alone = cls()
            alone.observe(1, one_s)
            return alone
        return cls(one_s, max(0.0, (many_s - one_s) / (many - 1)), 1.0)

    def observe(self, choices: int, seconds: float) -> None:
        """A step decoded so many choices in so many seconds."""
        if not self._choices:
            self.seconds, self._choices = seconds, float(choices)
            self.per_choice = seconds / (_UNKNOWN_BATCH + choices)
            return
        aside = choices - self._choices
        surprise_s = seconds - self.of(choices)
        correction = _GAIN * surprise_s * aside / (aside * aside + 1.0)
        self.per_choice = max(0.0, self.per_choice + correction)
        self._choices += _RECENT * aside
        self.seconds += _RECENT * (seconds - self.seconds)

    def of(self, choices: int) -> float:
        """Seconds that a step of so many choices is expected to take."""
        return max(0.0, self.seconds + self.per_choice * (choices - self._choices))
