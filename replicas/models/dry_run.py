"""A few tokens through a loaded model, to learn its shapes and to prove that it fits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels.attention_batch import AttentionBatch, Segment
from kernels.pool_layout import transposed_keys
from replicas.models.architectures import check_architecture
from replicas.models.attention_recorder import AttentionRecorder
from replicas.models.errors import UnsupportedArchitectureError
from replicas.models.hf_adapter import ATTENTION, AttentionCall, PagedAttention, run

_BLOCK_SIZE = 16
_TOKENS = 18
"""More than a block; computed in two chunks."""
_FIRST_CHUNK = 10
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Relative error of the logits. Rounding alone stays far below the first; in bfloat16 it can
send a token to other experts, so that only gross errors tell."""


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """What attention is called with, equal in all layers, and the width of the logits."""

    num_layers: int
    num_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    vocab_size: int
    windows: tuple[int | None, ...]
    """The distinct ones, in the layers' order."""


def inspect(model: PreTrainedModel) -> ModelShapes:
    """The shapes of a model whose paged attention is proven equal to its own.

    Each layer has to call attention once, in one shape, causally and without a mask of its
    own, with a window exactly where the configuration has one; then a chunked prefill through
    a pool has to give the logits that transformers' eager attention gives.

    Raises:
        UnsupportedArchitectureError: names the architecture and what does not fit.
    """
    check_architecture(model.config.to_dict())
    try:
        shapes = _record(model)
        _compare(model, shapes)
    except _MisfitError as error:
        raise _refusal(model, str(error)) from error
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = f"a dry run fails with {type(error).__name__}: {error}"
        raise _refusal(model, reason) from error
    return shapes


def _refusal(model: PreTrainedModel, reason: str) -> UnsupportedArchitectureError:
    return UnsupportedArchitectureError(f"{type(model).__name__} is not supported: {reason}")


class _MisfitError(Exception):
    """What does not fit, without the architecture's name."""


class _SmallPool:
    """A KV pool that just holds the dry run; block 0 is reserved."""

    def __init__(self, shapes: ModelShapes, model: PreTrainedModel) -> None:
        blocks = 1 + -(-_TOKENS // _BLOCK_SIZE)
        width = max(shapes.key_dim, shapes.value_dim)
        self._memory = torch.zeros(
            (shapes.num_layers, 2, blocks, shapes.kv_heads, _BLOCK_SIZE, width),
            dtype=model.dtype,
            device=model.device,
        )

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        keys, values = self._memory[index]
        return (transposed_keys(keys) if keys.device.type == "cpu" else keys), values

    def scales(self, index: int) -> None:
        """None: it keeps the model's own element type."""


def _record(model: PreTrainedModel) -> ModelShapes:
    recorder = AttentionRecorder()
    tokens = _tokens(model)[:1]
    logits = run(model, tokens, torch.zeros_like(tokens), recorder, torch.zeros_like(tokens))
    layers = model.config.get_text_config().num_hidden_layers
    _check_calls(recorder.calls, layers)
    _check_windows(model, recorder.calls)
    first = recorder.calls[0]
    return ModelShapes(
        num_layers=layers,
        num_heads=first.query.shape[1],
        kv_heads=first.key.shape[1],
        key_dim=first.key.shape[2],
        value_dim=first.value.shape[2],
        vocab_size=logits.shape[-1],
        windows=tuple(dict.fromkeys(call.window for call in recorder.calls)),
    )


def _check_calls(calls: list[AttentionCall], layers: int) -> None:
    seen = sorted(call.layer for call in calls)
    if seen != list(range(layers)):
        raise _MisfitError(f"{len(set(seen))} of {layers} layers call attention, {len(seen)} times")
    if len({(call.query.shape, call.key.shape, call.value.shape) for call in calls}) > 1:
        raise _MisfitError("its layers differ in their heads")
    if any(call.mask is not None for call in calls):
        raise _MisfitError("it builds an attention mask of its own")
    if not all(call.causal for call in calls):
        raise _MisfitError("its attention is not causal")


def _check_windows(model: PreTrainedModel, calls: list[AttentionCall]) -> None:
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    for call in calls:
        slides = window is not None if types is None else types[call.layer] == "sliding_attention"
        expected = window if slides else None
        if call.window != expected:
            raise _MisfitError(
                f"layer {call.layer} attends with a window of {call.window}, not {expected}"
            )


def _compare(model: PreTrainedModel, shapes: ModelShapes) -> None:
    tokens = _tokens(model)
    positions = torch.arange(_TOKENS, device=tokens.device)
    last = positions[_FIRST_CHUNK:]
    model.set_attn_implementation("eager")
    expected = run(model, tokens, positions, None, last)
    model.set_attn_implementation(ATTENTION)
    pool = _SmallPool(shapes, model)
    for rows in (positions[:_FIRST_CHUNK], last):
        blocks = range(1, 1 + -(-_TOKENS // _BLOCK_SIZE))
        segment = Segment(int(rows[0]), len(rows), tuple(blocks))
        batch = AttentionBatch.build([segment], _BLOCK_SIZE, tokens.device)
        actual = run(model, tokens[rows], rows, PagedAttention(pool, batch), rows - rows[0])
    error = float((actual - expected).norm() / expected.norm())
    if not error <= _TOLERANCE[model.dtype]:
        raise _MisfitError(f"its logits are off by {error:.2g} of their norm with paged attention")


def _tokens(model: PreTrainedModel) -> Tensor:
    vocab_size = model.config.get_text_config().vocab_size
    return (3 + 7 * torch.arange(_TOKENS, device=model.device)) % vocab_size
