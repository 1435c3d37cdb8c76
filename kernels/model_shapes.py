"""Attention shapes of models that are served: what kernels are compiled and checked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class HeadNorm(Enum):
    """The RMS norm of each query and key head before rotation."""

    NONE = "none"
    MODEL = "model"
    """Its weight is of the model's type."""
    FLOAT32 = "float32"
    """Its weight is 1 + w, in float32."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the attention layers of some models have in common."""

    models: str
    """Some of them, by name; a family's members differ in depth and width."""
    heads: int
    kv_heads: int
    head_dim: int
    rot_dim: int = 0
    """Dimensions that our kernel rotates; 0 where the model does it or has no rotation."""
    value_dim: int | None = None
    """Width of values, where not head_dim."""
    windows: tuple[bool, ...] = (False,)
    """Whether layers have a sliding window; two values where some have and some have not."""
    capped: bool = False
    """Scores are soft-capped."""
    sinks: bool = False
    head_norm: HeadNorm = HeadNorm.NONE


BOTH = (False, True)

MODELS: tuple[ModelShape, ...] = (
    ModelShape("Llama 3.1 8B, Mistral Nemo, Mixtral 8x7B, SmolLM3 3B", 32, 8, 128, 128),
    ModelShape("Llama 3.2 1B, Granite 3 2B", 32, 8, 64, 64),
    ModelShape("SmolLM2 135M and 360M", 9, 3, 64, 64),
    ModelShape("SmolLM2 1.7B", 32, 32, 64, 64),
    ModelShape("Phi-1.5", 32, 32, 64, 32),
    ModelShape("GPT-2, OPT 125M to 1.3B", 12, 12, 64),
    ModelShape("Pythia 70M to 410M, StableLM 2 1.6B", 16, 16, 64, 16),
    ModelShape("Qwen2.5 0.5B", 14, 2, 64, 64),
    ModelShape("gpt-oss 20B and 120B", 64, 8, 64, 64, windows=BOTH, sinks=True),
    ModelShape("Phi-2", 32, 32, 80, 32),
    ModelShape("OPT 2.7B", 32, 32, 80),
    ModelShape("Pythia 2.8B", 32, 32, 80, 20),
    ModelShape("Phi-3 mini", 32, 32, 96, 96, windows=BOTH),
    ModelShape("GPT-NeoX 20B", 64, 64, 96, 24),
    ModelShape("heads of 112, as in MPT 30B", 64, 64, 112, 112),
    ModelShape("heads of 112, grouped", 32, 8, 112, 112),
    ModelShape("Llama 2 7B and 13B, OLMo 2 7B and 13B", 32, 32, 128, 128),
    ModelShape("OLMo 3 7B", 32, 32, 128, 128, windows=BOTH),
    ModelShape("OPT 6.7B to 66B", 32, 32, 128),
    ModelShape("Pythia 6.9B and 12B", 32, 32, 128, 32),
    ModelShape("Qwen3 0.6B and 1.7B", 16, 8, 128, 128, head_norm=HeadNorm.MODEL),
    ModelShape("Gemma 2 27B", 32, 16, 128, 128, windows=BOTH, capped=True),
    ModelShape("Gemma 3 27B", 32, 16, 128, 128, windows=BOTH, head_norm=HeadNorm.FLOAT32),
    ModelShape("Llama 3.2 3B", 24, 8, 128, 128),
    ModelShape("Phi-4 mini", 24, 8, 128, 96),
    ModelShape("Qwen3 4B and 8B", 32, 8, 128, 128, head_norm=HeadNorm.MODEL),
    ModelShape("Mistral 7B v0.1, Ministral 8B", 32, 8, 128, 128, windows=(True,)),
    ModelShape("Command R7B, which rotates by pairs and not in every layer", 32, 8, 128,
               windows=BOTH),
    ModelShape("Qwen2.5 14B and 32B, OLMo 2 32B", 40, 8, 128, 128),
    ModelShape("Qwen3 14B", 40, 8, 128, 128, head_norm=HeadNorm.MODEL),
    ModelShape("OLMo 3 32B", 40, 8, 128, 128, windows=BOTH),
    ModelShape("Qwen2.5 1.5B", 12, 2, 128, 128),
    ModelShape("Qwen2.5 7B", 28, 4, 128, 128),
    ModelShape("Llama 3.1 70B, Qwen2.5 3B and 72B", 64, 8, 128, 128),
    ModelShape("Qwen3 32B and 30B-A3B", 64, 8, 128, 128, head_norm=HeadNorm.MODEL),
    ModelShape("StarCoder2 7B", 36, 4, 128, 128, windows=(True,)),
    ModelShape("StarCoder2 3B and 15B", 24, 2, 128, 128, windows=(True,)),
    ModelShape("Llama 3.1 405B", 128, 8, 128, 128),
    ModelShape("Qwen3 235B-A22B", 64, 4, 128, 128, head_norm=HeadNorm.MODEL),
    ModelShape("GLM-4 9B, which rotates by pairs", 32, 2, 128),
    ModelShape("DeepSeek V3 with expanded keys and values", 128, 128, 192, value_dim=128),
    ModelShape("Gemma 7B", 16, 16, 256, 256),
    ModelShape("GPT-J 6B, which rotates by pairs", 16, 16, 256),
    ModelShape("Pythia 1B", 8, 8, 256, 64),
    ModelShape("Gemma 2 2B and 9B", 8, 4, 256, 256, windows=BOTH, capped=True),
    ModelShape("Gemma 3 4B and 12B", 8, 4, 256, 256, windows=BOTH, head_norm=HeadNorm.FLOAT32),
    ModelShape("Gemma 3 270M and 1B", 4, 1, 256, 256, windows=BOTH, head_norm=HeadNorm.FLOAT32),
    ModelShape("Gemma 2B", 8, 1, 256, 256),
)  # fmt: skip
"""By published configurations; where several ask for one variant, it is compiled with the first
one's numbers. A model that is not here runs all the same where a shape here equals its own."""
