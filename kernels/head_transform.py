"""What a model does to the heads of queries and keys before it attends: RMS norm, then rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """Left to attention, so that one kernel can do it while it writes keys into the pool."""

    cos: Tensor | None = None
    """[T, rot_dim]; None rotates nothing. Dimensions beyond rot_dim stay as they are."""
    sin: Tensor | None = None
    """[T, rot_dim]."""
    q_norm: Tensor | None = None
    """[dim], the weight of the queries' norm; None where there is none."""
    k_norm: Tensor | None = None
    """[dim]."""
    norm_eps: float = 0.0

    def apply(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Query `[T, heads, dim]` and key `[T, kv_heads, dim]` as attention is to see them.

        Computed in float32 and rounded once, as the kernel does it. The rotation is that of
        Su et al., "RoFormer" (2021), by halves: dimension i turns with i + rot_dim / 2.
        """
        return self._apply(query, self.q_norm), self._apply(key, self.k_norm)

    def _apply(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        values = heads.float()
        if weight is not None:
            values = F.rms_norm(values, weight.shape, weight.float(), self.norm_eps)
        if self.cos is not None and self.sin is not None:
            width = self.cos.shape[-1]
            turned, rest = values[..., :width], values[..., width:]
            first, second = turned.chunk(2, dim=-1)
            across = torch.cat((-second, first), dim=-1)
            cos, sin = self.cos.float()[:, None], self.sin.float()[:, None]
            values = torch.cat((turned * cos + across * sin, rest), dim=-1)
        return values.to(heads.dtype)
