"""Candidates are all tokens above a floor that at least k tokens reach."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replicas.engine.candidates import floors, group_maxima, select, take_rows
from tests.replicas.engine.sampling_cases import score_rows


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@settings(max_examples=80, deadline=None)
@given(scores=score_rows(), count=st.sampled_from([1, 3, 20, 5000]))
def test_candidates_of_one_row(scores: Tensor, count: int) -> None:
    maxima = group_maxima(scores[None])
    floor = floors(maxima, torch.tensor([count]))
    (found,) = select(scores[None], maxima, floor)
    wanted = (scores >= floor).nonzero().squeeze(1)
    assert found.token_ids[0].tolist() == wanted.tolist()
    assert found.scores[0].tolist() == scores[wanted].tolist()
    assert found.counts.tolist() == [len(wanted)]
    assert len(wanted) >= min(count, int(scores.isfinite().sum()))
    assert bool(scores[wanted].isfinite().all()), "a masked token became a candidate"


def test_each_row_comes_once_padded_with_its_equals_or_alone() -> None:
    scores = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0))
    scores[1], scores[3] = 0.0, 1.0
    maxima = group_maxima(scores)
    batches = list(select(scores, maxima, floors(maxima, torch.tensor([2, 2, 9, 2, 1]))))
    assert [batch.rows.tolist() for batch in batches] == [[0, 2, 4], [1], [3]]
    narrow = batches[0]
    assert narrow.scores.shape[1] == int(narrow.counts.max()) < 100
    padding = torch.arange(narrow.scores.shape[1]) >= narrow.counts[:, None]
    assert torch.equal(narrow.scores == -torch.inf, padding)


def test_masked_tokens_are_no_candidates() -> None:
    scores = torch.full((1, 3000), -torch.inf)
    scores[0, [40, 2000]] = torch.tensor([-5.0, 1.0])
    maxima = group_maxima(scores)
    (found,) = select(scores, maxima, floors(maxima, torch.tensor([50])))
    assert found.token_ids.tolist() == [[40, 2000]]


def test_neighbouring_rows_are_not_copied() -> None:
    matrix = torch.arange(12.0).reshape(4, 3)
    assert take_rows(matrix, [1, 2]).data_ptr() == matrix[1].data_ptr()
    assert torch.equal(take_rows(matrix, [0, 3]), matrix[[0, 3]])
