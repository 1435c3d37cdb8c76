"""Reported log-probabilities against torch's log_softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replicas.engine.sampler import Sampler
from tests.replicas.engine import sampling_reference as reference
from tests.replicas.engine.sampling_cases import score_rows


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@settings(max_examples=80, deadline=None)
@given(scores=score_rows(), data=st.data(), top=st.sampled_from([0, 1, 5, 20, 100]))
def test_one_row(scores: Tensor, data: st.DataObject, top: int) -> None:
    token = data.draw(st.integers(0, len(scores) - 1))
    (found,) = Sampler(len(scores), ()).token_logprobs(scores[None], [token], top)
    wanted = scores.double().log_softmax(0)
    tolerance = 1e-5 + 1e-6 * float(scores[scores.isfinite()].abs().max())
    assert found.logprob == pytest.approx(float(wanted[token]), abs=tolerance)
    assert found.rank == 1 + int((scores > scores[token]).sum())
    likeliest = [t for t in reference.ranking(scores)[:top] if scores[t] > -torch.inf]
    assert [t for t, _ in found.top] == likeliest
    assert [value for _, value in found.top] == pytest.approx(
        wanted[likeliest].tolist(), abs=tolerance
    )
    assert found.logprob <= 0
    assert dict(found.top).get(token, found.logprob) == found.logprob


def test_many_rows_come_in_order() -> None:
    """More rows than are worked on at once."""
    torch.manual_seed(0)
    logits = torch.randn(150, 2000) * 4
    token_ids = torch.randint(2000, (150,)).tolist()
    found = Sampler(2000, ()).token_logprobs(logits, token_ids, 3)
    raw = logits.log_softmax(1)
    top = raw.topk(3)
    assert len(found) == 150
    for n, one in enumerate(found):
        assert one.logprob == pytest.approx(float(raw[n, token_ids[n]]), abs=1e-5)
        assert [t for t, _ in one.top] == top.indices[n].tolist()


def test_wide_ties_are_ranked_by_id() -> None:
    """More equal tokens than share a padded batch, beside a row that has none."""
    logits = torch.zeros(2, 3000)
    logits[1] = torch.arange(3000.0)
    level, steep = Sampler(3000, ()).token_logprobs(logits, [2999, 2999], 3)
    assert [t for t, _ in level.top] == [0, 1, 2]
    assert [t for t, _ in steep.top] == [2999, 2998, 2997]
    assert (level.rank, steep.rank) == (1, 1)


def test_no_tokens() -> None:
    assert Sampler(10, ()).token_logprobs(torch.empty(0, 10), [], 3) == ()


def test_shape_is_checked() -> None:
    with pytest.raises(ValueError, match="3 rows"):
        Sampler(10, ()).token_logprobs(torch.zeros(2, 10), [1, 2, 3], 0)
