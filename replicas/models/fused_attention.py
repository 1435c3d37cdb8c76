"""Attention modules for a GPU: one linear layer, and a kernel that does the rest of the way in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from kernels.head_transform import HeadTransform
from replicas.models.agreement import FEWER_ROUNDINGS, agree, runs_and
from replicas.models.fused_linear import fuse_linears, share_weights
from replicas.models.hf_adapter import Attention, AttentionCall
from replicas.models.norms import RMSNorm
from replicas.models.observation import Observed

_PARTS = ("q_proj", "k_proj", "v_proj")
_ALREADY_FUSED = "qkv_proj"
_OUTPUTS = ("o_proj", "dense", "out_proj")


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The RMS norms of each head of queries and of keys."""

    query: Tensor
    """[dim]."""
    key: Tensor
    """[dim]."""
    eps: float


class FusedAttention(nn.Module):
    """Queries, keys and values by one multiplication; norm and rotation are left to attention.

    Takes and gives what transformers' module of the same layer does. Without our attention it
    is that module, which reads its weights out of this one's.
    """

    def __init__(
        self,
        original: nn.Module,
        qkv: nn.Linear,
        output: nn.Module,
        like: AttentionCall,
        norms: HeadNorms | None,
        *,
        rotates: bool,
    ) -> None:
        """`like` is a call that the original made: of its heads and constants."""
        super().__init__()
        self.original = original
        self.qkv_proj, self.o_proj = qkv, output
        self._like, self._norms, self._rotates = like, norms, rotates
        self._heads = like.query.shape[1], like.key.shape[1], like.value.shape[1]

    def forward(
        self, *args: Any, quire_attention: Attention | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Hidden states [1, T, hidden] -> ([1, T, hidden], None)."""
        if quire_attention is None:
            output: tuple[Tensor, None] = self.original(*args, **kwargs)
            return output
        hidden = args[0] if args else kwargs["hidden_states"]
        heads = self.qkv_proj(hidden)[0].unflatten(-1, (sum(self._heads), -1))
        query, key, value = heads.split(self._heads, dim=1)
        like = self._like
        call = AttentionCall(
            layer=like.layer,
            query=query,
            key=key,
            value=value,
            scale=like.scale,
            window=like.window,
            soft_cap=like.soft_cap,
            sinks=like.sinks,
            mask=None,
            causal=True,
            heads=self._transform(kwargs),
        )
        return self.o_proj(quire_attention.attend(call).flatten(1)[None]), None

    def _transform(self, kwargs: dict[str, Any]) -> HeadTransform:
        cos = sin = None
        if self._rotates:
            cos, sin = (table[0] for table in kwargs["position_embeddings"])
        if self._norms is None:
            return HeadTransform(cos, sin)
        return HeadTransform(cos, sin, self._norms.query, self._norms.key, self._norms.eps)


def attention_names(model: nn.Module) -> list[str]:
    """The modules of a model that may be fused."""
    return [name for name, module in model.named_modules() if _linears(module)]


def fuse_attention(model: nn.Module, observed: dict[str, Observed]) -> None:
    """Replace, in place, the observed modules that ask the same of attention when fused."""
    for name, seen in observed.items():
        original = model.get_submodule(name)
        linears, output = _linears(original), _output(original)
        if not linears or output is None or not _is_plain(seen):
            continue
        fused = _fused(original, linears, output, seen)
        if fused is not None:
            if len(linears) > 1:
                share_weights(fused.qkv_proj, linears)
            model.set_submodule(name, fused)


def _fused(
    original: nn.Module, linears: Sequence[nn.Linear], output: nn.Module, seen: Observed
) -> FusedAttention | None:
    (call,) = seen.attention
    qkv = linears[0] if len(linears) == 1 else fuse_linears(linears)
    heads = call.query.shape[1] + 2 * call.key.shape[1]
    if qkv.out_features != heads * call.query.shape[2]:
        return None
    norms = _norms(original, call.query.shape[2])
    for rotates in (True, False):
        fused = FusedAttention(original, qkv, output, call, norms, rotates=rotates)
        if runs_and(partial(_agrees, fused, seen)):
            return fused
    return None


def _is_plain(seen: Observed) -> bool:
    """Whether it attends once, causally, without a mask, and gives nothing but hidden states."""
    if len(seen.attention) != 1 or not isinstance(seen.output, tuple):
        return False
    (call,) = seen.attention
    plain = call.causal and call.mask is None and call.query.shape[2] == call.value.shape[2]
    return plain and len(seen.output) == 2 and seen.output[1] is None


def _agrees(fused: FusedAttention, seen: Observed) -> bool:
    (output, _), (call,) = seen.repeat(fused)
    (expected,) = seen.attention
    assert call.heads is not None
    query, key = call.heads.apply(call.query, call.key)
    pairs = (
        (query, expected.query),
        (key, expected.key),
        (call.value, expected.value),
        (output, seen.output[0]),
    )
    return all(agree(ours, theirs, FEWER_ROUNDINGS) for ours, theirs in pairs)


def _linears(module: nn.Module) -> list[nn.Linear]:
    """The layer or layers of its queries, keys and values; empty where it has none."""
    fused = getattr(module, _ALREADY_FUSED, None)
    if type(fused) is nn.Linear:
        return [fused]
    parts = [getattr(module, part, None) for part in _PARTS]
    return [part for part in parts if part is not None] if _all_linear(parts) else []


def _all_linear(parts: Sequence[object]) -> bool:
    return all(type(part) is nn.Linear for part in parts)


def _output(module: nn.Module) -> nn.Module | None:
    for name in _OUTPUTS:
        layer = getattr(module, name, None)
        if isinstance(layer, nn.Module):
            return layer
    return None


def _norms(module: nn.Module, dim: int) -> HeadNorms | None:
    query, key = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    if not isinstance(query, RMSNorm) or not isinstance(key, RMSNorm):
        return None
    if not query.weight.shape == key.weight.shape == (dim,):
        return None
    return HeadNorms(query.weight.detach(), key.weight.detach(), query.eps)
