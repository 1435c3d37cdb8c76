"""Several linear layers over one input, as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def fuse_linears(parts: Sequence[nn.Linear]) -> nn.Linear:
    """A layer that gives the parts' outputs, one after the other; its weights are a copy."""
    weight = torch.cat([part.weight.detach() for part in parts])
    fused = nn.Linear(
        weight.shape[1],
        weight.shape[0],
        bias=any(part.bias is not None for part in parts),
        device="meta",  # no memory for weights that are replaced in the next line
    )
    fused.weight = nn.Parameter(weight, requires_grad=False)
    if fused.bias is not None:
        biases = [_bias(part) for part in parts]
        fused.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return fused


def share_weights(fused: nn.Linear, parts: Sequence[nn.Linear]) -> None:
    """Let the parts read their weights out of the fused layer's, and free their own."""
    sizes = [part.out_features for part in parts]
    weights = fused.weight.detach().split(sizes)
    for part, weight in zip(parts, weights, strict=True):
        part.weight = nn.Parameter(weight, requires_grad=False)


def _bias(part: nn.Linear) -> Tensor:
    bias: Tensor | None = part.bias
    return part.weight.new_zeros(part.out_features) if bias is None else bias.detach()
