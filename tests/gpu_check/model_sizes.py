"""The models with random weights that engines are run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaConfig


@dataclass(frozen=True, slots=True)
class Size:
    """What a Llama is made of."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int = 65536

    def config(self) -> LlamaConfig:
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.context,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=False,
        )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Of the linear layers of all layers."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def step_weights(self) -> int:
        """What a step reads: the embedding is looked up only."""
        return self.layer_weights + self.hidden * self.vocabulary

    def kv_bytes(self, tokens: float) -> float:
        """Of bfloat16 keys and values, over all layers."""
        return tokens * 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def prefill_operations(self, tokens: int) -> float:
        """Of a prompt, without its logits: multiplications and additions, attention causal."""
        attention = 4.0 * tokens * tokens / 2 * self.heads * self.head_dim * self.layers
        return 2.0 * tokens * self.layer_weights + attention


SIZE_8B = Size(4096, 14336, 32, 32, 8, 128_256)
SIZE_SHALLOW = Size(4096, 14336, 2, 32, 8, 32_000)
SIZE_1B = Size(2048, 8192, 16, 32, 8, 32_000)
SIZE_DRY = Size(64, 96, 2, 4, 2, 192, 512)
