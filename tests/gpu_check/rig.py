"""What every section is given: the device, where to report, and how long there is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu_check.records import Fact, Recorder

if TYPE_CHECKING:
    import torch

COPY = "copy, bytes/s"
READ = "read, bytes/s"
MATMUL = "matmul bf16, flop/s"
TO_HOST = "pinned copy to host, bytes/s"
FROM_HOST = "pinned copy from host, bytes/s"


class UnavailableError(Exception):
    """A section cannot run here, for the reason given."""


@dataclass(frozen=True, slots=True)
class Rig:
    """Frozen; sections get a copy of their own."""

    dry: bool
    """Tiny shapes on the CPU in Triton's interpreter: the code is checked, not the machine."""
    compiling: bool = False
    """Kernels are compiled for the real shapes, not launched: whatever no kernel is compiled for
    is tiny, and on the CPU."""
    recorder: Recorder = field(default_factory=lambda: Recorder(Path("/dev/null")))
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What earlier sections found out."""
    deadline: float = float("inf")
    """On `time.monotonic`'s clock."""

    @property
    def small(self) -> bool:
        """Whether as little as possible is to be computed."""
        return self.dry or self.compiling

    @property
    def device(self) -> str:
        return "cpu" if self.small else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """That of benches. The interpreter's bfloat16 dot products are wrong."""
        import torch

        return torch.float16 if self.dry else torch.bfloat16

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def ceiling(self, name: str) -> float | None:
        """A measured rate, such as `COPY`; None where its section failed."""
        value = self.facts.get(name)
        return None if value is None else float(value)

    def floor_s(self, name: str, amount: float) -> float | None:
        """Seconds that `amount` of bytes or operations takes at least."""
        ceiling = self.ceiling(name)
        return None if ceiling is None else amount / ceiling

    def fact(self, name: str, value: Any) -> None:
        self.recorder.add(Fact(name, value))

    def seed(self, text: str) -> torch.Generator:
        """A generator on the device that depends on `text` alone."""
        import torch

        number = int.from_bytes(text.encode(), "little") % (2**61 - 1)
        return torch.Generator(self.device).manual_seed(number)
