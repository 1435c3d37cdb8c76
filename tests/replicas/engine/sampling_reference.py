"""The sampler's definitions, spelt out for one row in plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from replicas.core.sampling_params import SamplingParams
from replicas.engine.noise import Words

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


def noise(key: Words, token_id: int) -> float:
    """By the four steps that `replicas.engine.noise` promises."""
    group, place = divmod(token_id, 32)
    word = _mix(group ^ key[2]) ^ key[3]
    shared = _exponential(word) / 32
    if place == word % 32:
        return shared
    return shared + _exponential(_mix(token_id ^ key[0]) ^ key[1])


def _mix(x: int) -> int:
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def _exponential(word: int) -> float:
    return -math.log1p(-(word // 32 + 0.5) / 2**27)


def drawn(scores: Tensor, tokens: Iterable[int], temperature: float, key: Words) -> int:
    """Which of `tokens` is drawn from scores [V], the lowest id among equals."""
    values = scores.tolist()
    scale = float(torch.tensor(max(temperature, 1e-30)))
    return max(sorted(tokens), key=lambda i: values[i] / scale - math.log(noise(key, i)))
