"""Replaces modules of a loaded model by faster ones that compute the same.

Norms and MLPs are run beside their replacements, and replaced only where the results agree.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replicas.models.packed_linear import pack_linears

_ROWS = 4
_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-4}
"""Relative error: sums in another order pass, a rounding more or less does not."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in the weight's dtype, rounded to x's."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        weight = self.weight
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.eps).to(x.dtype)


class RoundedRMSNorm(RMSNorm):
    """The same, with x / rms(x) rounded to x's dtype before the weight comes in."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return F.rms_norm(x, self.weight.shape, None, self.eps) * self.weight


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), without memory for each step of it."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self.act_fn = nn.SiLU(inplace=True) if type(act) is nn.SiLU else act

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        hidden: Tensor = self.act_fn(self.gate_proj(x))
        output: Tensor = self.down_proj(hidden.mul_(self.up_proj(x)))
        return output


@torch.inference_mode()
def swap(model: nn.Module) -> None:
    """Replace, in place, RMS norms, gated MLPs and, on CPU, linear layers."""
    _swap_norms(model)
    _swap_mlps(model)
    if next(model.parameters()).device.type == "cpu":
        pack_linears(model)


def _swap_norms(model: nn.Module) -> None:
    for name, norm in list(model.named_modules()):
        weight = getattr(norm, "weight", None)
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if not type(norm).__name__.endswith("RMSNorm") or weight is None or eps is None:
            continue
        x = _sample(weight.shape[-1], weight)
        for candidate in _norms(weight.detach(), eps):
            if _agree(candidate(x), norm(x)):
                model.set_submodule(name, candidate)
                break


def _norms(weight: Tensor, eps: float) -> Iterator[nn.Module]:
    yield RMSNorm(weight, eps)
    yield RoundedRMSNorm(weight, eps)
    yield RMSNorm(1.0 + weight.float(), eps)


def _swap_mlps(model: nn.Module) -> None:
    agreed: dict[type[nn.Module], bool] = {}
    for name, mlp in list(model.named_modules()):
        parts = [
            getattr(mlp, part, None) for part in ("gate_proj", "up_proj", "down_proj", "act_fn")
        ]
        gate, up, down, act = parts
        if not (type(gate) is type(up) is type(down) is nn.Linear and isinstance(act, nn.Module)):
            continue
        candidate = GatedMLP(gate, up, down, act)
        if type(mlp) not in agreed:
            x = _sample(gate.in_features, gate.weight)
            agreed[type(mlp)] = _agree(candidate(x), mlp(x))
        if agreed[type(mlp)]:
            model.set_submodule(name, candidate)


def _sample(width: int, like: Tensor) -> Tensor:
    """[rows, width] of values between -1 and 1 without a pattern."""
    count = torch.arange(_ROWS * width, device=like.device, dtype=torch.float32)
    return torch.sin(count * count).reshape(_ROWS, width).to(like.dtype)


def _agree(actual: Tensor, expected: Tensor) -> bool:
    difference = (actual.float() - expected.float()).norm() / expected.float().norm()
    return actual.dtype == expected.dtype and float(difference) <= _TOLERANCE[expected.dtype]
