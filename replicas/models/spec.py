"""What the engine knows of a loaded model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and identities of one loaded model; holds no tensors."""

    architecture: str
    """Class name, such as `LlamaForCausalLM`."""
    num_layers: int
    num_heads: int
    """Query heads of a layer."""
    kv_heads: int
    """Key and value heads of a layer, as attention sees them."""
    head_dim: int
    """Elements of a head in the KV pool: the greater of a key's and a value's."""
    vocab_size: int
    """Columns of the logits."""
    max_position: int
    """Tokens of context at the most."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Element type of the weights: `float32` or `bfloat16`."""
    fingerprint: str
    """Hex; equal for equal weights and configuration, whatever the machine."""
    num_parameters: int
    """Tied parameters count once."""
    windows: tuple[int | None, ...] = (None,)
    """The distinct ones of its layers: how many keys a query sees, its own included."""
