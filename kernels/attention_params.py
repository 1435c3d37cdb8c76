"""What attention does to its scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the index tensors of a decode group depend on."""

    num_heads: int
    kv_heads: int
    key_dim: int
    """Width of queries and keys."""
    pool_dim: int
    """Width of a slot of the pool, >= key_dim."""
    block_size: int


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """A layer's constants: `cap * tanh(scale * q.k / cap)`, then the window, then softmax."""

    scale: float
    window: int | None = None
    """Query p sees keys p - window + 1 .. p; None sees all."""
    soft_cap: float | None = None
    sinks: Tensor | None = None
    """[Hq], logits that join each head's softmax denominator and have no value."""
    k_scale: Tensor | None = None
    """[Hkv] float32, what an e4m3 pool's keys are multiplied by; None for other pools."""
    v_scale: Tensor | None = None
    """[Hkv] float32, the same of its values."""

    @property
    def query_scale(self) -> float:
        """What the query is multiplied by before the dot product."""
        return self.scale / self.soft_cap if self.soft_cap is not None else self.scale

    def cap(self, scores: Tensor) -> None:
        """Soft-cap scaled scores in place."""
        if self.soft_cap is not None:
            scores.tanh_().mul_(self.soft_cap)

    def sink_share(self, scores: Tensor, heads: tuple[int, ...]) -> Tensor | None:
        """What a softmax without sinks is to be multiplied by: `[..., 1]` for masked scores
        `[..., keys]`; `heads` is the shape in which `sinks` broadcasts to `[...]`."""
        if self.sinks is None:
            return None
        total = scores.logsumexp(-1, keepdim=True)
        return torch.sigmoid(total - self.sinks.to(scores.dtype).view(*heads, 1))
