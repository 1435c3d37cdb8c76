"""Sampling on the device: what truncation keeps, how often each token is drawn, and that each draw
is the CPU sampler's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from replicas.core.sampling_params import SamplingParams
from replicas.engine.sampler import Sampler
from tests.gpu_check.items import SAMPLE_CHECKS
from tests.gpu_check.rig import Rig
from tests.gpu_check.sample_problem import EVERYTHING, draw, rows_of
from tests.gpu_check.shapes import SAMPLE_VOCAB
from tests.gpu_check.targets import checked, exact

VOCABULARY = 4096
_LIKELY = 48
"""Tokens that are drawn often enough to be seen, all of them."""
_MOST_DEVIATION = 5.0
"""Of chi-square from its expectation, in its standard deviations."""


def run(rig: Rig) -> None:
    """Three rows."""
    _draws(rig)
    _against_cpu(rig)


def _draws(rig: Rig) -> None:
    """Many draws from the same logits, which have ties on purpose. Every token that truncation
    keeps is drawn at least once, and no other."""
    count, vocabulary, likely = (12, 96, 3) if rig.dry else (16384, VOCABULARY, _LIKELY)
    scores = torch.full((vocabulary,), -30.0, device=rig.device)
    places = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(3))[:likely]
    steps = torch.arange(likely, device=rig.device) // 3  # threes of equal scores
    scores[places.to(rig.device)] = 1.0 - steps / (8.0 if rig.dry else 6.0)
    logits = scores.expand(count, -1).contiguous()
    wrong, worst, worst_name = 0, -math.inf, ""
    for name, sampling in _truncations(rig).items():
        drawn = draw(rig, logits, sampling)
        found = torch.bincount(drawn, minlength=vocabulary)
        kept = _kept(scores, sampling)
        wrong += int(((found > 0) != kept).sum())
        deviation = _deviation(found, scores, kept, sampling.temperature)
        if math.isnan(deviation) or deviation > worst:  # NaN is worst, and stays it
            worst, worst_name = deviation, name
    rig.recorder.add(exact(SAMPLE_CHECKS[0], wrong, len(_truncations(rig)) * vocabulary))
    note = f"above what chance expects; worst: {worst_name}"
    rig.recorder.add(checked(SAMPLE_CHECKS[1], worst, _MOST_DEVIATION, unit="std", note=note))


def _truncations(rig: Rig) -> dict[str, SamplingParams]:
    def of(**more: float) -> SamplingParams:
        return SamplingParams(1, 11, **{"temperature": 1.0, "top_p": 0.9999, **more})

    if rig.dry:
        return {"top-k 2": of(top_k=2)}
    return {
        "all likely": of(),
        "top-k 20": of(top_k=20),  # among three equal ones
        "top-k 41, hot": of(top_k=41, temperature=2.5),
        "top-p 0.8": of(top_p=0.8),
        "top-p 0.5, warm": of(top_p=0.5, temperature=1.5),
        "min-p 0.1": of(min_p=0.1),
        "all three": of(top_k=40, top_p=0.9, min_p=0.04),
    }


def _kept(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """[V] bool by a stable sort in float64: top-k, then top-p of what that left, then min-p."""
    ranked = torch.sort(scores.double(), descending=True, stable=True)
    weights = ((ranked.values - ranked.values[0]) / sampling.temperature).exp()
    places = torch.arange(len(scores), device=scores.device)
    if sampling.top_k:
        weights = weights * (places < sampling.top_k)
    before = weights.cumsum(0) - weights
    keep = (before < sampling.top_p * weights.sum()) & (weights > 0)
    keep &= weights >= sampling.min_p
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(0, ranked.indices, keep)


def _deviation(found: Tensor, scores: Tensor, kept: Tensor, temperature: float) -> float:
    """How far chi-square of the counts is above its expectation, in standard deviations."""
    chances = (scores.double()[kept] / temperature).softmax(0)
    expected = chances * found.sum()
    chi_square = float(((found[kept] - expected).square() / expected).sum())
    freedom = int(kept.sum()) - 1
    return (chi_square - freedom) / (2 * freedom) ** 0.5


def _against_cpu(rig: Rig) -> None:
    """The engine's own sampler on the CPU, over the same logits."""
    rows, vocabulary = (2, 200) if rig.dry else (32, SAMPLE_VOCAB)
    wrong = total = 0
    sampler = Sampler(vocabulary, ())
    for index, sampling in enumerate(_mixture(rig)):
        generator = torch.Generator().manual_seed(index)
        logits = 3 * torch.randn(rows, vocabulary, generator=generator)
        sampled = sampler.sample(logits, rows_of(sampling, rows))
        expected = [each.token_id for each in sampled]
        drawn = draw(rig, logits.to(rig.device), sampling)
        wrong += sum(a != b for a, b in zip(drawn.tolist(), expected, strict=True))
        total += rows
    rig.recorder.add(exact(SAMPLE_CHECKS[2], wrong, total))


def _mixture(rig: Rig) -> list[SamplingParams]:
    def of(temperature: float, **more: float) -> SamplingParams:
        return SamplingParams(1, 13, temperature=temperature, **more)

    everything = [
        of(0.0),
        of(1.0),
        of(0.7, top_p=0.9),
        of(0.3, top_p=0.99, min_p=0.02),
        of(1.0, top_k=50),
        of(2.0, top_k=5000, top_p=0.7),
        of(1.5, min_p=0.001),
        of(1.0, top_p=0.999),
        of(1.0, repetition_penalty=1.2, frequency_penalty=0.3),
        EVERYTHING,
    ]
    return [everything[2], EVERYTHING] if rig.dry else everything
