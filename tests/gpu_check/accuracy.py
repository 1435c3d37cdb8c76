"""The numerics contract: errors against float64, and outputs that were never written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from tests.gpu_check.oracle import relative_error
from tests.gpu_check.records import Row
from tests.gpu_check.rig import Rig
from tests.gpu_check.targets import checked

T = TypeVar("T")

LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""||error|| / ||reference||, by the type that is computed in."""


def dtypes(rig: Rig) -> tuple[torch.dtype, ...]:
    """Those to check. The interpreter's bfloat16 is not to be trusted."""
    return (torch.float16,) if rig.dry else (torch.bfloat16, torch.float16)


def poisoned(call: Callable[[], T]) -> T:
    """`call()`, with NaN in all memory that it allocates without filling it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass(slots=True)
class Worst:
    """The case that comes closest to its limit, or goes furthest beyond."""

    error: float = 0.0
    limit: float = 1.0
    name: str = ""
    cases: int = 0
    broken: list[str] = field(default_factory=list)

    def see(self, found: Tensor, expected: Tensor, dtype: torch.dtype, name: str) -> float:
        """Compare; the error."""
        error, limit = relative_error(found, expected), LIMITS[dtype]
        self.cases += 1
        # NaN is worst, and stays it.
        if self.cases == 1 or math.isnan(error) or error / limit > self.error / self.limit:
            self.error, self.limit, self.name = error, limit, name
        return error

    def demand(self, holds: bool, otherwise: str) -> None:
        """What no error can say."""
        if not holds:
            self.broken.append(otherwise)

    def row(self, item: str) -> Row:
        note = f"worst of {self.cases}: {self.name.replace('torch.', '')}"
        if self.broken:
            note += f"; {len(self.broken)} broken, such as {self.broken[0]}"
        fine = not self.broken and self.cases > 0
        return checked(item, self.error, self.limit, passed=fine, note=note)
