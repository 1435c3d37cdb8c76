"""The one adapter between transformers' model definitions and our paged attention."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kernels import dispatch
from kernels.attention_batch import AttentionBatch
from kernels.head_transform import HeadTransform
from replicas.models.spec import ModelSpec

if TYPE_CHECKING:
    from kernels.gpu.attention_step import AttentionStep

ATTENTION = "quire_paged"
"""The name of our attention in transformers' registry."""


class KVLayers(Protocol):
    """A KV pool, one layer at a time."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(key blocks, value blocks), each [num_blocks, kv_heads, block_size, head_dim]."""
        ...

    def scales(self, index: int) -> tuple[Tensor, Tensor] | None:
        """(k_scale, v_scale) of a layer in an fp8 pool, each [kv_heads] float32; else None."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks of attention: the ragged batch's T new tokens, attended causally."""

    layer: int
    query: Tensor
    """[T, heads, key_dim]."""
    key: Tensor
    """[T, kv_heads, key_dim]."""
    value: Tensor
    """[T, kv_heads, value_dim]."""
    scale: float
    window: int | None
    """A query sees this many keys, its own included; None sees all."""
    soft_cap: float | None
    sinks: Tensor | None
    """[heads]: one more logit in the softmax' denominator."""
    mask: Tensor | None
    """None, unless the model builds a mask of its own."""
    causal: bool
    heads: HeadTransform | None = None
    """What queries and keys still need before they are attended; None where they are ready."""


class Attention(Protocol):
    """Carries out the calls of one forward pass."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns [T, heads, value_dim]."""
        ...


class PagedAttention:
    """Attention over a KV pool, into which the new keys and values go first."""

    def __init__(self, kv: KVLayers, batch: AttentionBatch | AttentionStep) -> None:
        self._kv = kv
        self._batch = batch

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns [T, heads, value_dim]."""
        key_blocks, value_blocks = self._kv.layer(call.layer)
        k_scale, v_scale = self._kv.scales(call.layer) or (None, None)
        return dispatch.paged_attention(
            call.query,
            call.key,
            call.value,
            key_blocks,
            value_blocks,
            self._batch,
            scale=call.scale,
            window=call.window,
            soft_cap=call.soft_cap,
            sinks=call.sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            heads=call.heads,
        )


class PagedModel:
    """A causal language model whose keys and values live in a KV pool."""

    def __init__(self, model: PreTrainedModel, spec: ModelSpec, folder: Path | None = None) -> None:
        """`folder` is where its checkpoint lies, if it has one."""
        self._model = model
        self.spec = spec
        self.folder = folder

    @property
    def device(self) -> torch.device:
        return self._model.device

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: KVLayers,
        batch: AttentionBatch | AttentionStep,
        logit_rows: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute a ragged batch of new tokens: `input_ids` and `positions` are [T] int64, and
        `batch` says which kernels attend.

        Returns the logits of the rows `logit_rows` ([R] int64), as [R, vocab] float32; in `out`,
        where that is given.
        """
        return run(self._model, input_ids, positions, PagedAttention(kv, batch), logit_rows, out)


@torch.inference_mode()
def run(
    model: PreTrainedModel,
    input_ids: Tensor,
    positions: Tensor,
    attention: Attention | None,
    logit_rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One forward pass, see `PagedModel.forward`; without `attention` a model uses its own, and
    without `logit_rows` the logits are those of the last token."""
    extra: dict[str, Any] = {} if attention is None else {"quire_attention": attention}
    output = model(
        input_ids=input_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=1 if logit_rows is None else logit_rows,
        **extra,
    )
    logits: Tensor = output.logits
    return logits[0].float() if out is None else out.copy_(logits[0])


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    quire_attention: Attention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; tensors are [1, heads, T, dim].

    The keywords are transformers' own names; those not listed change nothing in inference,
    which the dry run at load proves for each model.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    call = AttentionCall(
        layer=module.layer_idx,  # type: ignore[arg-type]
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
        mask=attention_mask,
        causal=causal,
    )
    return quire_attention.attend(call)[None], None


AttentionInterface.register(ATTENTION, _attend)
