"""The sampler's definitions, spelt out for one row in plain Python."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from replicas.core.sampling_params import SamplingParams

ONE = 2**34


def whole_weights(scores: Tensor, temperature: float) -> list[int]:
    """Of scores [V]."""
    exponents = (scores - scores.max()) / torch.tensor(max(temperature, 1e-30))
    return [int(weight) for weight in torch.round(torch.exp(exponents) * ONE).tolist()]


def ranking(scores: Tensor) -> list[int]:
    """Token ids from the highest score down, the lowest id first among equals."""
    values = scores.tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def kept(scores: Tensor, params: SamplingParams) -> dict[int, int]:
    """Token ids and weights of what can be drawn from scores [V]."""
    weights = whole_weights(scores, params.temperature)
    ranked = ranking(scores)
    if params.top_k:
        ranked = ranked[: params.top_k]
    needed = params.top_p * sum(weights[token] for token in ranked)
    least = float(torch.tensor(params.min_p * ONE, dtype=torch.float32))
    nucleus: dict[int, int] = {}
    reached = 0
    for token in ranked:
        if nucleus and reached >= needed:
            break
        reached += weights[token]
        nucleus[token] = weights[token]
    return {token: w for token, w in nucleus.items() if w > 0 and w >= least}


def drawn(weights: Mapping[int, int], uniform: float) -> int:
    """The inverse of the cumulative distribution, in the order of token ids."""
    target = uniform * sum(weights.values())
    reached = 0
    for token in sorted(weights):
        reached += weights[token]
        if reached > target:
            return token
    raise AssertionError("the target lies beyond the total")
