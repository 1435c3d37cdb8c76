"""One compiled variant of a kernel: what a call and ahead-of-time compilation agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
"""Triton's names of torch's element types."""


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel with everything fixed that it is compiled for.

    Ops make theirs in one function, `launch(...)`, from shapes and types alone, so that
    `kernels/variants.py` can list and compile what the engine is going to ask for. They make each
    once, and it is known by its identity.
    """

    op: str
    """Names the kernel, such as `attn_decode`."""
    kernel: Any
    """The `triton.jit` function."""
    types: Mapping[str, str]
    """Argument -> Triton's type, such as `*bf16` or `i32`; every one that is no constant."""
    constants: Mapping[str, Any]
    """`tl.constexpr` argument -> value; None for a pointer that is not given."""
    num_warps: int
    num_stages: int = 1

    @property
    def key(self) -> str:
        """Equal for equal variants, readable, stable from run to run."""
        types = ",".join(f"{name}:{kind}" for name, kind in self.types.items())
        constants = ",".join(f"{name}={value}" for name, value in self.constants.items())
        return f"{self.op}[{types}][{constants}][w{self.num_warps}s{self.num_stages}]"

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told besides types and constants."""
        # Products are fused into sums whatever Triton's default is: 3.10 changes it.
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }

    def __call__(self, grid: tuple[int, ...], **arguments: Any) -> None:
        """Run it with a value for each of `types`."""
        self.kernel[grid](**arguments, **self.constants, **self.options)


def pointer(dtype: torch.dtype) -> str:
    """Triton's type of a pointer to elements of `dtype`."""
    return f"*{TYPE_NAMES[dtype]}"
