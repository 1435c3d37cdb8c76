"""Gated MLPs: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.elementwise import Elementwise
from replicas.models.agreement import FEWER_ROUNDINGS, agree, runs_and, sample
from replicas.models.fused_linear import fuse_linears

_PROBED = 64
"""Columns of numbers by which an activation is told."""


class GatedMLP(nn.Module):
    """For a CPU: without memory for each step of it."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self.act_fn = nn.SiLU(inplace=True) if type(act) is nn.SiLU else act

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        hidden: Tensor = self.act_fn(self.gate_proj(x))
        output: Tensor = self.down_proj(hidden.mul_(self.up_proj(x)))
        return output


class FusedGatedMLP(nn.Module):
    """For a GPU: gate and up are one multiplication, activation and product one kernel."""

    def __init__(
        self, gate_up: nn.Linear, down: nn.Module, act: nn.Module, ops: Elementwise
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = gate_up, down, act
        self._ops = ops
        self._silu = _is_silu(act, gate_up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        gate_up = self.gate_up_proj(x)
        if self._silu:
            hidden = self._ops.silu_mul(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            hidden = self.act_fn(gate).mul_(up)
        output: Tensor = self.down_proj(hidden)
        return output


def swap_mlps(model: nn.Module) -> None:
    """Replace, in place, the gated MLPs that a `GatedMLP` agrees with."""
    agreed: dict[type[nn.Module], bool] = {}
    for name, mlp in list(model.named_modules()):
        gate, up, down, act = (
            getattr(mlp, part, None) for part in ("gate_proj", "up_proj", "down_proj", "act_fn")
        )
        if not (type(gate) is type(up) is type(down) is nn.Linear and isinstance(act, nn.Module)):
            continue
        candidate = GatedMLP(gate, up, down, act)
        if type(mlp) not in agreed:
            x = sample(gate.in_features, gate.weight)
            agreed[type(mlp)] = agree(candidate(x), mlp(x))
        if agreed[type(mlp)]:
            model.set_submodule(name, candidate)


def fuse_mlps(model: nn.Module, ops: Elementwise) -> None:
    """Replace, in place, the gated MLPs that a `FusedGatedMLP` agrees with.

    Some models come with gate and up in one layer, which is used as it is.
    """
    refused: set[type[nn.Module]] = set()
    # By name: whoever holds the modules holds their weights, twice the memory of all of them.
    for name in [name for name, mlp in model.named_modules() if _parts(mlp)]:
        mlp = model.get_submodule(name)
        fused = None if type(mlp) in refused else _fuse(mlp, ops)
        if fused is None:
            continue
        if _agrees(fused, mlp):
            model.set_submodule(name, fused)
        else:
            refused.add(type(mlp))


def _parts(mlp: nn.Module) -> list[nn.Linear]:
    """The layer or layers of gate and up; empty where it has none."""
    gate_up = getattr(mlp, "gate_up_proj", None)
    if type(gate_up) is nn.Linear:
        return [gate_up]
    gate, up = getattr(mlp, "gate_proj", None), getattr(mlp, "up_proj", None)
    return [gate, up] if type(gate) is type(up) is nn.Linear else []


def _fuse(mlp: nn.Module, ops: Elementwise) -> FusedGatedMLP | None:
    down, act, parts = getattr(mlp, "down_proj", None), _activation(mlp), _parts(mlp)
    if type(down) is not nn.Linear or act is None:
        return None
    gate_up = parts[0] if len(parts) == 1 else fuse_linears(parts)
    return FusedGatedMLP(gate_up, down, act, ops)


def _activation(mlp: nn.Module) -> nn.Module | None:
    for name in ("act_fn", "activation_fn"):
        act = getattr(mlp, name, None)
        if isinstance(act, nn.Module):
            return act
    return None


def _is_silu(act: nn.Module, like: Tensor) -> bool:
    """By what it computes: torch and transformers have classes of their own for it."""
    x = sample(_PROBED, like)
    return runs_and(lambda: torch.equal(act(x.clone()), F.silu(x)))


def _agrees(fused: FusedGatedMLP, mlp: nn.Module) -> bool:
    weight = fused.gate_up_proj.weight
    x = sample(weight.shape[1], weight)
    return runs_and(lambda: agree(fused(x), mlp(x), FEWER_ROUNDINGS))
