"""Decoder layers for a GPU: adding what attention gives and the next norm are one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from replicas.models.agreement import FEWER_ROUNDINGS, agree, runs_and
from replicas.models.norms import RMSNorm
from replicas.models.observation import Observed


class _Names(NamedTuple):
    """How a family of models calls the norms of its layers."""

    before_attention: str
    after_attention: str | None
    before_mlp: str
    after_mlp: str | None


_FAMILIES = (
    _Names("input_layernorm", None, "post_attention_layernorm", None),
    _Names(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    _Names(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
)


class FusedDecoderLayer(nn.Module):
    """h = x + [norm](attention(norm(x))); h + [norm](mlp(norm(h)))."""

    def __init__(self, original: nn.Module, names: _Names) -> None:
        super().__init__()
        # Some models ask their layers for their kind.
        plain = {key: value for key, value in vars(original).items() if not key.startswith("_")}
        self.__dict__.update({key: value for key, value in plain.items() if key != "training"})
        self.self_attn = original.get_submodule("self_attn")
        self.mlp = original.get_submodule("mlp")
        self.before_attention = original.get_submodule(names.before_attention)
        before_mlp = original.get_submodule(names.before_mlp)
        assert isinstance(before_mlp, RMSNorm)
        self.before_mlp = before_mlp
        self.after_attention = _optional(original, names.after_attention)
        self.after_mlp = _optional(original, names.after_mlp)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]; the keywords are attention's."""
        normed = self.before_attention(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        attended = self.after_attention(attended)
        normed, hidden_states = self.before_mlp.add(attended, hidden_states)
        total: Tensor = hidden_states + self.after_mlp(self.mlp(normed))
        return total


def layer_names(model: nn.Module) -> list[str]:
    """The modules of a model that may be replaced."""
    return [name for name, module in model.named_modules() if any(_fitting(module))]


def fuse_layers(model: nn.Module, observed: dict[str, Observed]) -> None:
    """Replace, in place, the observed layers that one of ours agrees with."""
    for name, seen in observed.items():
        layer = model.get_submodule(name)
        for names in _fitting(layer):
            fused = FusedDecoderLayer(layer, names)
            if runs_and(partial(_agrees, fused, seen)):
                model.set_submodule(name, fused)
                break


def _fitting(layer: nn.Module) -> Iterator[_Names]:
    """The families whose names the layer has, all of them and no other norm's."""
    children = dict(layer.named_children())
    if not {"self_attn", "mlp"} <= children.keys():
        return
    norms = {name for name, child in children.items() if isinstance(child, RMSNorm)}
    for names in _FAMILIES:
        if norms == {name for name in names if name is not None}:
            yield names


def _agrees(fused: FusedDecoderLayer, seen: Observed) -> bool:
    output, _ = seen.repeat(fused)
    return agree(output, seen.output, FEWER_ROUNDINGS)


def _optional(layer: nn.Module, name: str | None) -> nn.Module:
    return nn.Identity() if name is None else layer.get_submodule(name)
