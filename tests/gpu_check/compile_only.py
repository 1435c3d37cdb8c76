"""Kernels that are compiled where they would be launched, as a call would compile them.

Triton keeps what it compiled by everything that a call compiles it for, constants and the
alignment of pointers among it. So only calls themselves, stopped before the launch, fill its cache
for other calls.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.gpu.launch import TYPE_NAMES, Launch

_ELEMENTS = {"fp64": torch.float64, **{name: dtype for dtype, name in TYPE_NAMES.items()}}
_NUMBERS = {"i32": 3, "i64": 2**40, "fp32": 0.5}
"""A number that has the type."""


def stop_launches() -> None:
    """From now on, launches in this process compile and do no more. What they would have written
    is not to be looked at."""

    def stopped(self: Launch, grid: tuple[int, ...], **arguments: Any) -> None:
        self.kernel.warmup(grid=(1,), **arguments, **self.constants, **self.options)

    Launch.__call__ = stopped  # type: ignore[method-assign]


def compile_listed(launch: Launch) -> None:
    """Compile for a call with any arguments of the launch's types, pointers being aligned."""
    arguments = {
        name: torch.empty(16, dtype=_ELEMENTS[kind[1:]]) if kind[0] == "*" else _NUMBERS[kind]
        for name, kind in launch.types.items()
    }
    launch.kernel.warmup(grid=(1,), **arguments, **launch.constants, **launch.options)


def without_device(arch: int) -> None:
    """Compile for compute capability `arch`, such as 90, in a process that has no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        """What a call asks of the driver before it launches."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

    driver.set_active(Driver())
