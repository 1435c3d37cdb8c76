"""How busy the box is with other things."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_IDLE, _IOWAIT, _STEAL = 3, 4, 7
_GUEST = 8
"""From here on times are counted a second time."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Ticks of all cores since boot, as in the first line of /proc/stat."""

    total: int
    idle: int
    stolen: int
    """Taken by other guests of the host."""

    @classmethod
    def now(cls) -> Self:
        return cls.parse(Path("/proc/stat").read_text())

    @classmethod
    def parse(cls, text: str) -> Self:
        ticks = [int(field) for field in text.splitlines()[0].split()[1:]][:_GUEST]
        return cls(sum(ticks), ticks[_IDLE] + ticks[_IOWAIT], ticks[_STEAL])

    def busy_since(self, earlier: Self) -> float:
        """The share of time, from 0 to 1, in which cores worked or were taken away."""
        return 1.0 - (self.idle - earlier.idle) / max(1, self.total - earlier.total)

    def stolen_since(self, earlier: Self) -> float:
        """The share of time, from 0 to 1, that other guests took."""
        return (self.stolen - earlier.stolen) / max(1, self.total - earlier.total)


@dataclass(frozen=True, slots=True)
class Idleness:
    """The box over a short while."""

    busy: float
    """Share from 0 to 1."""
    load: float
    """Average over a minute: what ran before this look counts as well."""

    @classmethod
    def look(cls, seconds: float) -> Self:
        before = CpuTimes.now()
        time.sleep(seconds)
        return cls(CpuTimes.now().busy_since(before), os.getloadavg()[0])

    def __str__(self) -> str:
        return f"{self.busy:.0%} busy, load {self.load:.1f}"
