"""Shapes of the models that can be simulated."""

from __future__ import annotations

from dataclasses import dataclass

_BYTES = 2
"""Of a weight or a KV element: bfloat16."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated feed-forward part."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    max_position: int

    @property
    def layer_parameters(self) -> int:
        """Of all layers; every computed token passes them."""
        queries = 2 * self.hidden * self.heads * self.head_dim  # and the output projection
        keys = 2 * self.hidden * self.kv_heads * self.head_dim
        return self.layers * (queries + keys + 3 * self.hidden * self.feed_forward)

    @property
    def head_parameters(self) -> int:
        """Of the projection to logits; only drawn tokens pass it."""
        return self.hidden * self.vocabulary

    @property
    def layer_bytes(self) -> int:
        return self.layer_parameters * _BYTES

    @property
    def head_bytes(self) -> int:
        return self.head_parameters * _BYTES

    @property
    def weight_bytes(self) -> int:
        """All weights; embedding and head are not tied in these models."""
        return self.layer_bytes + 2 * self.head_bytes

    @property
    def kv_bytes(self) -> int:
        """A token's keys and values over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14_336, 128_256, 131_072),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28_672, 128_256, 131_072),
    )
}
"""By name. Source: config.json of Meta's published checkpoints."""
