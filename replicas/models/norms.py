"""RMS norms: transformers writes them in five ops, one is enough."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from kernels.elementwise import Elementwise
from replicas.models.agreement import agree, runs_and, sample


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in the weight's dtype, rounded to x's."""

    rounded: ClassVar[bool] = False

    def __init__(self, weight: Tensor, eps: float, ops: Elementwise) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return self._ops.rms_norm(x, self.weight, self.eps, rounded=self.rounded)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), all [..., width]."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps, rounded=self.rounded)


class RoundedRMSNorm(RMSNorm):
    """The same, with x / rms(x) rounded to x's dtype before the weight comes in."""

    rounded: ClassVar[bool] = True


def swap_norms(model: nn.Module, ops: Elementwise) -> None:
    """Replace, in place, the RMS norms that one of ours agrees with."""
    for name, norm in list(model.named_modules()):
        weight = getattr(norm, "weight", None)
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if not type(norm).__name__.endswith("RMSNorm") or weight is None or eps is None:
            continue
        x = sample(weight.shape[-1], weight)
        for candidate in _norms(weight.detach(), eps, ops):
            if runs_and(partial(_agrees, candidate, norm, x)):
                model.set_submodule(name, candidate)
                break


def _agrees(candidate: nn.Module, norm: nn.Module, x: Tensor) -> bool:
    return agree(candidate(x), norm(x))


def _norms(weight: Tensor, eps: float, ops: Elementwise) -> Iterator[nn.Module]:
    yield RMSNorm(weight, eps, ops)
    yield RoundedRMSNorm(weight, eps, ops)
    yield RMSNorm(1.0 + weight.float(), eps, ops)
