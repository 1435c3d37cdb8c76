"""Hypothesis strategies for scores and sampling parameters."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from replicas.core.sampling_params import SamplingParams

SIZES = [1, 2, 31, 32, 33, 64, 100, 257, 700, 3000]


@st.composite
def score_rows(draw: st.DrawFn) -> Tensor:
    """[V]: smooth, with many ties, all equal, spread very wide, or partly masked."""
    size = draw(st.sampled_from(SIZES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scores = torch.randn(size, generator=generator) * draw(st.sampled_from([0.1, 1.0, 3.0, 1e4]))
    kind = draw(st.sampled_from(["smooth", "ties", "equal", "masked"]))
    if kind == "ties":
        return (scores * 2).round() / 2
    if kind == "equal":
        return torch.full((size,), 1.5)
    if kind == "masked":
        mask = torch.rand(size, generator=generator) < 0.7
        mask[draw(st.integers(0, size - 1))] = False
        return scores.masked_fill(mask, -torch.inf)
    return scores


def sampled_params() -> st.SearchStrategy[SamplingParams]:
    """Temperature above 0, and any truncation."""
    return st.builds(
        SamplingParams,
        max_tokens=st.just(100),
        seed=st.integers(0, 2**64 - 1),
        temperature=st.sampled_from([1e-40, 1e-7, 0.01, 0.3, 1.0, 2.0, 50.0]),
        top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 600, 10_000_000]),
        top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0]),
        min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0]),
    )
