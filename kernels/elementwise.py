"""Element-wise work between matrix multiplications: what it is, and how torch does it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Elementwise(Protocol):
    """Ops that one kernel does in one pass over memory; `dispatch.elementwise` gives some."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounded: bool) -> Tensor:
        """x / rms(x) * weight over the last dimension: x `[..., width]`, weight `[width]`.

        `rounded`: x / rms(x) is rounded to x's dtype before the weight comes in, as Llama does
        it; otherwise only the product is rounded.
        """
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounded: bool
    ) -> tuple[Tensor, Tensor]:
        """(the norm of x + residual, x + residual), the sum rounded to x's dtype first."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of `[..., 2 * width]`, the gate first: `[..., width]`."""
        ...


class TorchElementwise:
    """With torch's own ops, on any device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounded: bool) -> Tensor:
        """[..., width] -> [..., width]."""
        if rounded:
            return F.rms_norm(x, weight.shape, None, eps) * weight
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, rounded: bool
    ) -> tuple[Tensor, Tensor]:
        """[..., width] twice -> [..., width] twice."""
        total = x + residual
        return self.rms_norm(total, weight, eps, rounded=rounded), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[..., 2 * width] -> [..., width]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
