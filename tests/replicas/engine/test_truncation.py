"""Exactly the tokens that top-k, top-p and min-p mean are kept, with exact weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from replicas.core.sampling_params import SamplingParams
from replicas.engine.draw_params import DrawParams
from replicas.engine.logit_processors import SampleRow
from replicas.engine.truncation import Limits, keep_few, keep_many, keep_only_
from replicas.engine.weights import DEEPEST, ONE
from tests.replicas.engine import sampling_reference as reference
from tests.replicas.engine.sampling_cases import sampled_params, score_rows

ALL_LIMITS = Limits(top_k=True, top_p=True, min_p=True)
NO_LIMITS = Limits(top_k=False, top_p=False, min_p=False)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def draw_params(scores: Tensor, *params: SamplingParams) -> DrawParams:
    rows = [SampleRow(p, 0, 0) for p in params]
    return DrawParams.of(rows, scores.shape[1], scores.device)


def few(scores: Tensor, params: DrawParams, count: int, total: Tensor | None) -> set[int]:
    """What `keep_few` keeps of one row; empty where it finds the row incomplete."""
    (found,) = keep_few(scores, params, torch.tensor([count]), total)
    assert found.rows.tolist() == [0]
    if not found.complete.item():
        return set()
    kept = found.scores[0] > -torch.inf
    token_ids: list[int] = found.token_ids[0, kept].tolist()
    assert torch.equal(found.scores[0, kept], scores[0, token_ids])
    return set(token_ids)


def many(scores: Tensor, params: DrawParams, limits: Limits) -> list[dict[int, int]]:
    return [
        {token: int(weight) for token, weight in enumerate(row) if weight}
        for row in keep_many(scores, params, limits).tolist()
    ]


@settings(max_examples=80, deadline=None)
@given(scores=score_rows(), sampling=sampled_params())
def test_kept_set_over_the_vocabulary(scores: Tensor, sampling: SamplingParams) -> None:
    params = draw_params(scores[None], sampling)
    wanted = reference.kept(scores, sampling)
    assert many(scores[None], params, ALL_LIMITS) == [wanted]
    exact_limits = Limits(0 < sampling.top_k < len(scores), sampling.top_p < 1, sampling.min_p > 0)
    assert many(scores[None], params, exact_limits) == [wanted]


@settings(max_examples=80, deadline=None)
@given(scores=score_rows(), sampling=sampled_params())
def test_kept_set_of_few_candidates(scores: Tensor, sampling: SamplingParams) -> None:
    params = draw_params(scores[None], sampling)
    wanted = set(reference.kept(scores, sampling))
    if sampling.top_k:
        assert few(scores[None], params, int(params.top_k), None) == wanted
        return
    total = torch.tensor([sum(reference.whole_weights(scores, sampling.temperature))]).double()
    assert few(scores[None], params, 5, total) in (wanted, set())
    assert few(scores[None], params, len(scores), total) == wanted


def test_nucleus_that_lies_beyond_the_candidates_is_reported() -> None:
    scores = torch.arange(3000.0)[None] / 3000
    params = draw_params(scores, SamplingParams(9, 0, top_p=0.5))
    total = keep_many(scores, params, NO_LIMITS).sum(1, dtype=torch.float64)
    assert few(scores, params, 10, total) == set()
    assert len(many(scores, params, ALL_LIMITS)[0]) > 1000


def test_kept_set_agrees_with_probabilities_in_float64() -> None:
    """Independent of how weights are rounded, except within 1e-6 of a limit."""
    torch.manual_seed(0)
    scores = torch.randn(20, 1000) * 3
    sampling = SamplingParams(9, 0, temperature=0.7, top_p=0.8)
    found = many(scores, draw_params(scores, *[sampling] * 20), ALL_LIMITS)
    for row, kept in zip(scores, found, strict=True):
        probabilities = (row.double() / 0.7).softmax(0)
        ranked = reference.ranking(row)
        reached = probabilities[ranked].cumsum(0)
        certain = 1 + int((reached < 0.8 - 1e-6).sum())
        possible = 1 + int((reached < 0.8 + 1e-6).sum())
        assert set(ranked[:certain]) <= set(kept) <= set(ranked[:possible])
        share = torch.tensor([kept[t] for t in ranked[:certain]]).double() / sum(kept.values())
        expected = probabilities[ranked[:certain]] / probabilities[list(kept)].sum()
        torch.testing.assert_close(share, expected, rtol=1e-5, atol=1e-9)


def test_ties_at_every_limit_go_to_the_lowest_ids() -> None:
    scores = torch.zeros(1, 500)
    scores[0, 400] = 1.0
    by_count = SamplingParams(9, 0, top_k=4)
    assert set(many(scores, draw_params(scores, by_count), ALL_LIMITS)[0]) == {400, 0, 1, 2}
    assert few(scores, draw_params(scores, by_count), 4, None) == {400, 0, 1, 2}
    even = torch.zeros(1, 500)
    by_share = draw_params(even, SamplingParams(9, 0, top_p=0.5))
    total = torch.tensor([500 * ONE], dtype=torch.float64)
    assert set(many(even, by_share, ALL_LIMITS)[0]) == set(range(250))
    assert few(even, by_share, 500, total) == set(range(250))


def test_scores_at_the_edges_of_bins() -> None:
    scores = torch.arange(100.0)[None] * -DEEPEST / 2048
    for count in range(1, 60):
        params = draw_params(scores, SamplingParams(9, 0, top_k=count))
        assert set(many(scores, params, ALL_LIMITS)[0]) == set(range(count))


def test_rows_keep_to_their_own_limits() -> None:
    torch.manual_seed(1)
    scores = torch.randn(4, 300)
    params = [
        SamplingParams(9, 0, top_k=3),
        SamplingParams(9, 0, top_p=0.3),
        SamplingParams(9, 0, min_p=0.2),
        SamplingParams(9, 0),
    ]
    found = many(scores, draw_params(scores, *params), ALL_LIMITS)
    wanted = [reference.kept(row, p) for row, p in zip(scores, params, strict=True)]
    assert found == wanted
    assert len({len(kept) for kept in found}) == 4


def test_scores_of_what_is_kept() -> None:
    scores = torch.tensor([[5.0, 3e38, -3e38, -torch.inf, 0.0, torch.nan]]).repeat(2, 1)
    weights = torch.tensor([[0.0, 0, 0, 0, 0, 0], [1, 2**34, 7, 0, 1, torch.nan]])
    dropped, kept = keep_only_(weights, scores).tolist()
    assert dropped[:5] == [-torch.inf] * 5
    assert kept[:5] == scores[1, :5].tolist()
    assert kept[5] != kept[5]
