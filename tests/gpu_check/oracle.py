"""float64 references that a device computes fast: whole tensors at a time.

`kernels/reference.py` goes through heads and tokens one by one; a test holds the two together.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of one segment's new tokens: query `[L, Hq, D]` at positions `start` ..,
    keys and values `[start + L, Hkv, D]`, sinks `[Hq]` -> `[L, Hq, Dv]` float64."""
    group = query.shape[1] // keys.shape[1]
    shape = (keys.shape[1], group, *query.shape[::2])
    grouped = query.double().permute(1, 0, 2).reshape(shape)  # [Hkv, G, L, D]
    scores = grouped @ keys.double().permute(1, 2, 0)[:, None] * scale
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    new = torch.arange(start, start + query.shape[0], device=query.device)[:, None]
    seen = torch.arange(keys.shape[0], device=query.device)[None]
    hidden = seen > new
    if window is not None:
        hidden |= seen <= new - window
    scores.masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        logits = sinks.double().view(*shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, logits), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    mixed = weights @ values.double().permute(1, 0, 2)[:, None]
    return mixed.flatten(0, 1).permute(1, 0, 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float64."""
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of `[N, 2 I]`, gate first, in float64."""
    gate, up = gate_up.double().chunk(2, -1)
    return gate * gate.sigmoid() * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `[T, H, D]` over the first `cos.shape[-1]` dimensions, whose halves are
    the pairs; in float64."""
    rotated = cos.shape[-1]
    turning, still = x.double()[..., :rotated], x.double()[..., rotated:]
    first, second = turning.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((turning * cos + turned * sin, still), -1)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Of the norms; NaN where `found` has any."""
    return float((found.double() - expected).norm() / expected.norm())
