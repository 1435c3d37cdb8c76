"""The oracle of the element-wise kernels, in float64 on the inputs as they are."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of `[..., width]`."""
    values = x.double()
    mean = (values * values).mean(-1, keepdim=True)
    return values / torch.sqrt(mean + eps) * weight.double()


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """`[..., 2 * width]`, the gate first -> `[..., width]`: gate * sigmoid(gate) * up."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def rotate_reference(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`[T, heads, dim]` with dimension i turned with i + rot_dim / 2, by `cos` and `sin`
    `[T, rot_dim]`: Su et al., "RoFormer" (2021), by halves."""
    turned = heads.double().clone()
    half = cos.shape[1] // 2
    for i in range(half):
        first, second = heads[..., i].double(), heads[..., i + half].double()
        cosines, sines = cos[:, None].double(), sin[:, None].double()
        turned[..., i] = first * cosines[..., i] - second * sines[..., i]
        turned[..., i + half] = second * cosines[..., i + half] + first * sines[..., i + half]
    return turned
