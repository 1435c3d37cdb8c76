"""Which architectures are refused, as far as their configuration alone tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replicas.models.errors import UnsupportedArchitectureError

SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

_REFUSED = {
    "bloom": "its attention adds ALiBi biases",
    "falcon": "its attention does not go through the attention interface",
    "falcon_mamba": "it has no attention",
    "llama4": "its layers attend within chunks",
    "llama4_text": "its layers attend within chunks",
    "mamba": "it has no attention",
    "mamba2": "it has no attention",
    "mpt": "its attention adds ALiBi biases",
    "qwen3_next": "some of its layers keep a recurrent state instead of keys and values",
}
"""Model type -> why. Most others that do not fit are found by the dry run at load."""


def check_architecture(config: Mapping[str, Any]) -> None:
    """Refuse a configuration (the contents of config.json) that is known not to work.

    Raises:
        UnsupportedArchitectureError: names the architecture and the reason.
    """
    text = config.get("text_config") or config
    for part in (config, text):
        reason = _REFUSED.get(part.get("model_type", ""))
        if reason is not None:
            raise UnsupportedArchitectureError(
                f"{architecture_name(config)} is not supported: {reason}"
            )
    if config.get("is_encoder_decoder"):
        raise UnsupportedArchitectureError(
            f"{architecture_name(config)} is not supported: it is an encoder-decoder"
        )
    others = set(text.get("layer_types") or ()) - SUPPORTED_LAYER_TYPES
    if others:
        raise UnsupportedArchitectureError(
            f"{architecture_name(config)} is not supported: it has layers of type "
            f"{', '.join(sorted(others))}"
        )


def architecture_name(config: Mapping[str, Any]) -> str:
    """The name an architecture is known by: its class, else its model type."""
    names = config.get("architectures") or (config.get("model_type"),)
    return str(names[0] or "a model without a model_type")
