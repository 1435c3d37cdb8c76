"""KV scales of a model whose checkpoint has none: from what it stores for a fixed prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch, Segment
from kernels.fp8 import FP8_MAX
from kernels.pool_layout import transposed_keys
from replicas.models.hf_adapter import PagedModel
from replicas.models.kv_scales import KVScaleError, KVScales

MARGIN = 4.0
"""A scale leaves room for values at least this many times the greatest that was seen. It costs
next to nothing: e4m3 has the same relative precision over 15 powers of two."""

_PROMPTS = 8
_TOKENS = 64
"""Of each prompt. Greatest values appear early: at the first tokens, which much attends to."""
_BLOCK_SIZE = 16
_HASH = 2_654_435_761
"""Knuth's multiplicative hash (The Art of Computer Programming 3, 6.4): it spreads the tokens of
the prompts over the vocabulary."""


@torch.inference_mode()
def calibrate(model: PagedModel) -> KVScales:
    """Powers of two, the same at each load: of all that the model stores for 8 prompts of 64
    tokens, which are spread over the vocabulary, the greatest magnitude of each layer, K or V,
    and kv head, times `MARGIN`, fits e4m3.

    With powers of two, dividing by a scale and multiplying by it are exact, and the last digits
    of a machine's arithmetic do not change what blocks are named.

    Raises:
        KVScaleError: the model stores what is not finite.
    """
    pool = _Pool(model)
    tokens = _tokens(model)
    count, length = tokens.shape
    table = torch.arange(1, 1 + count * pool.blocks_each).view(count, -1).tolist()
    segments = [Segment(0, length, blocks) for blocks in table]
    device = pool.memory.device
    model.forward(
        tokens.flatten().to(device),
        torch.arange(length).repeat(count).to(device),
        pool,
        AttentionBatch.build(segments, _BLOCK_SIZE, device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    greatest = pool.memory.abs().amax(dim=(2, 4, 5)).to("cpu", torch.float32)
    if not bool(greatest.isfinite().all()):
        raise KVScaleError("calibrating the KV scales: the model's keys or values are not finite")
    return KVScales(*_powers_of_two(greatest * (MARGIN / FP8_MAX)).unbind(1))


def _powers_of_two(least: Tensor) -> Tensor:
    """The least power of two that is not below each; 1 for 0."""
    mantissa, exponent = torch.frexp(torch.where(least > 0, least, 1.0))
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(least), exponent)


def _tokens(model: PagedModel) -> Tensor:
    """[prompts, tokens] int64"""
    length = min(_TOKENS, model.spec.max_position)
    number = torch.arange(_PROMPTS * length).view(_PROMPTS, length)
    return ((number + 1) * _HASH % 2**32) * model.spec.vocab_size // 2**32


class _Pool:
    """A KV pool in the model's own element type, for the prompts alone."""

    def __init__(self, model: PagedModel) -> None:
        spec = model.spec
        self.blocks_each = -(-min(_TOKENS, spec.max_position) // _BLOCK_SIZE)
        blocks = 1 + _PROMPTS * self.blocks_each
        shape = (spec.num_layers, 2, blocks, spec.kv_heads, _BLOCK_SIZE, spec.head_dim)
        self.memory = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=model.device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(key blocks, value blocks)"""
        keys, values = self.memory[index]
        return (transposed_keys(keys) if keys.device.type == "cpu" else keys), values

    def scales(self, index: int) -> None:
        """None: it keeps the model's own element type."""
