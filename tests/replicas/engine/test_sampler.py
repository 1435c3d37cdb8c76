"""Tokens drawn by the whole sampler."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler_output import SampledToken
from replicas.engine.logit_processors import SampleRow
from replicas.engine.noise import row_key
from replicas.engine.sampler import Sampler
from tests.replicas.engine import sampling_reference as reference
from tests.replicas.engine.sampling_cases import sampled_params, score_rows

VOCAB_SIZE = 5000
"""More groups of tokens than there are candidates for a nucleus at first."""
EOS = 2


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def row(output_index: int = 0, choice: int = 0, **sampling: Any) -> SampleRow:
    params = SamplingParams(**{"max_tokens": 100, "seed": 0, **sampling})
    return SampleRow(params, choice, output_index, (1, 5, 9), (11, 5, 11))


def draw(logits: Tensor, *rows: SampleRow) -> list[int]:
    sampler = Sampler(logits.shape[1], (EOS,))
    return [token.token_id for token in sampler.sample(logits, rows)]


def logits_of(rows: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB_SIZE, generator=generator) * scale


def drawn_by_reference(scores: Tensor, rows: list[SampleRow]) -> list[int]:
    """From the same scores [V] for all rows, which differ in their places only."""
    sampling = rows[0].sampling
    kept = reference.kept(scores, sampling)
    keys = [row_key(sampling.seed, row.choice, row.output_index) for row in rows]
    return [reference.drawn(scores, kept, sampling.temperature, key) for key in keys]


@settings(max_examples=80, deadline=None)
@given(scores=score_rows(), sampling=sampled_params(), choice=st.integers(0, 200))
def test_every_draw_equals_the_reference(
    scores: Tensor, sampling: SamplingParams, choice: int
) -> None:
    rows = [SampleRow(sampling, choice, index) for index in range(6)]
    assert draw(scores.repeat(6, 1), *rows) == drawn_by_reference(scores, rows)


@pytest.mark.parametrize(
    "truncation",
    [
        {"top_p": 0.9},
        {"top_p": 0.9, "min_p": 0.6},
        {"top_k": 700, "top_p": 0.9},
        {"top_k": 700, "min_p": 0.6},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.9},
    ],
)
def test_draws_from_wide_distributions(truncation: dict[str, Any]) -> None:
    logits = logits_of(1, 0.5)
    rows = [row(n, **truncation) for n in range(60)]
    assert draw(logits.repeat(60, 1), *rows) == drawn_by_reference(logits[0], rows)


@settings(max_examples=80, deadline=None)
@given(scores=score_rows())
def test_greedy_takes_the_lowest_id_among_the_highest(scores: Tensor) -> None:
    assert draw(scores[None], row(temperature=0)) == reference.ranking(scores)[:1]


def mixed_rows(count: int) -> list[SampleRow]:
    """Rows of all kinds, no two alike."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {},
        {"min_p": 0.1},
        {"top_k": 5},
        {"top_k": 500, "top_p": 0.8, "logprobs": 0},
        {"top_p": 0.6},
        {"top_p": 0.99, "temperature": 2.0},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 7},
        {"min_tokens": 90, "top_p": 0.9},
        {"logit_bias": ((4, 5.0), (8, -100.0)), "temperature": 0.0},
        {"allowed_token_ids": (3, 4, 5), "top_k": 2},
    ]
    return [row(seed=1000 + n, output_index=n % 7, **kinds[n % len(kinds)]) for n in range(count)]


def assert_same(found: SampledToken, wanted: SampledToken) -> None:
    assert found.token_id == wanted.token_id
    assert (found.logprobs is None) == (wanted.logprobs is None)
    if found.logprobs and wanted.logprobs:
        assert found.logprobs.logprob == pytest.approx(wanted.logprobs.logprob, abs=1e-6)
        assert found.logprobs.rank == wanted.logprobs.rank
        assert [t for t, _ in found.logprobs.top] == [t for t, _ in wanted.logprobs.top]


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_a_token_does_not_depend_on_the_batch(scale: float) -> None:
    rows, logits = mixed_rows(100), logits_of(100, scale)
    sampler = Sampler(VOCAB_SIZE, (EOS,))
    alone = [sampler.sample(logits[n : n + 1], rows[n : n + 1])[0] for n in range(100)]
    for seed in range(3):
        order = random.Random(seed).sample(range(100), 100 - 20 * seed)
        found = sampler.sample(logits[order], [rows[n] for n in order])
        for n, token in zip(order, found, strict=True):
            assert_same(token, alone[n])
    assert len({token.token_id for token in alone}) > 30


def test_logits_are_left_as_they_are() -> None:
    logits = logits_of(24)
    before = logits.clone()
    draw(logits, *mixed_rows(24))
    assert torch.equal(logits, before)


def test_same_seed_same_tokens_and_other_seed_other_tokens() -> None:
    logits = logits_of(1, 1.0).repeat(50, 1)

    def drawn(seed: int, choice: int) -> list[int]:
        return draw(logits, *(row(index, choice, seed=seed) for index in range(50)))

    assert drawn(1, 0) == drawn(1, 0)
    assert len({tuple(drawn(seed, choice)) for seed in range(3) for choice in range(3)}) == 9


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 0.4}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
        ({"logit_bias": ((350, -100.0),)}, [4 / 9, 3 / 9, 2 / 9, 0]),
    ],
)
@pytest.mark.parametrize("over", ["seeds", "output indices"])
def test_draws_follow_the_distribution(
    sampling: dict[str, Any], expected: list[float], over: str
) -> None:
    """Chi-square with at most 3 degrees of freedom: 28 is exceeded once in 300,000 tries."""
    count = 2000
    places = [200, 7, 90, 350]
    logits = torch.full((400,), -1000.0)
    logits[places] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    rows = [
        row(0, seed=n, **sampling) if over == "seeds" else row(n, **sampling) for n in range(count)
    ]
    seen = Counter(draw(logits.expand(count, -1), *rows))
    wanted = {place: count * p for place, p in zip(places, expected, strict=True) if p}
    assert set(seen) == set(wanted)
    assert sum((seen[place] - n) ** 2 / n for place, n in wanted.items()) < 28


def unlike(logits: Tensor, seed: int) -> Tensor:
    """As much unlike as batches of other shapes make them."""
    generator = torch.Generator().manual_seed(seed)
    return logits + (torch.rand(logits.shape, generator=generator) * 2 - 1) * 1e-5


def test_rounding_of_logits_does_not_change_the_draw() -> None:
    """A promise of the whole system: a preempted or moved choice goes on as it would have.

    The chance that one draw differs is that of the best two being within the difference of
    two errors, 3e-6 on average: 0.001 for all 300 draws here. Inverting the cumulative
    distribution, which these distributions are a hard case for, changes some of them.
    """
    vocab_size, inverted = 49152, 0
    generator = torch.Generator().manual_seed(0)
    zipf = -torch.arange(1.0, vocab_size + 1).log()
    for part in range(6):
        logits = torch.stack([zipf[torch.randperm(vocab_size, generator=generator)]] * 50)
        rows = [row(n, seed=part) for n in range(50)]
        one, other = unlike(logits, 2 * part), unlike(logits, 2 * part + 1)
        assert draw(one, *rows) == draw(other, *rows)
        target = torch.rand(50, 1, generator=generator, dtype=torch.float64)
        first, second = (x.double().softmax(1).cumsum(1) for x in (one, other))
        inverted += int(((first < target).sum(1) != (second < target).sum(1)).sum())
    assert inverted > 0


def test_noise_of_a_token_does_not_depend_on_the_truncation() -> None:
    """Who wins among all wins among fewer, too."""
    logits = logits_of(1, 2.0).repeat(200, 1)
    everyone = draw(logits, *[row(n) for n in range(200)])
    for truncation in [{"top_k": 30}, {"top_k": 600}, {"top_p": 0.7}, {"min_p": 0.02}]:
        rows = [row(n, **truncation) for n in range(200)]
        kept = reference.kept(logits[0], rows[0].sampling)
        found = draw(logits, *rows)
        same = [a == b for a, b in zip(found, everyone, strict=True) if b in kept]
        assert all(same)
        assert 20 < len(same) < 200


@pytest.mark.parametrize("temperature", [1e-300, 1e-7, 1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}, {"top_k": 9}, {"min_p": 0.1}])
def test_tiny_temperatures_equal_greedy(temperature: float, truncation: dict[str, Any]) -> None:
    logits = logits_of(20) * 10
    tiny = [row(n, temperature=temperature, **truncation) for n in range(20)]
    assert draw(logits, *tiny) == draw(logits, *[row(temperature=0)] * 20)


@pytest.mark.parametrize("top_p", [0.0, 1e-12, 1e-9])
@pytest.mark.parametrize("top_k", [0, 9, 500])
def test_tiny_top_p_equals_greedy(top_p: float, top_k: int) -> None:
    logits = logits_of(20, 0.1)
    tiny = [row(n, top_p=top_p, top_k=top_k) for n in range(20)]
    assert draw(logits, *tiny) == draw(logits, *[row(temperature=0)] * 20)


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    logits = logits_of(20)
    huge = [row(n, top_k=10_000_000) for n in range(20)]
    assert draw(logits, *huge) == draw(logits, *[row(n) for n in range(20)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_keeps_the_end_away(temperature: float) -> None:
    logits = logits_of(1, 0.1)
    logits[0, EOS] = 50.0
    early = row(4, min_tokens=5, temperature=temperature)
    late = row(5, min_tokens=5, temperature=temperature)
    ignored = row(4, min_tokens=5, temperature=temperature, ignore_eos=True)
    assert draw(logits, early) != [EOS]
    assert draw(logits, late) == draw(logits, ignored) == [EOS]


@pytest.mark.parametrize("truncation", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 1e-9}])
def test_only_allowed_tokens_are_drawn(truncation: dict[str, Any]) -> None:
    allowed = (17, 1999, 2998)
    rows = [row(n, allowed_token_ids=allowed, **truncation) for n in range(60)]
    assert set(draw(logits_of(1, 0.1).repeat(60, 1), *rows)) == set(allowed)


def test_logprobs_are_of_raw_logits_and_finite() -> None:
    logits = logits_of(1)
    favourite = int(logits.argmax())
    asked = row(
        temperature=0.0,
        logprobs=2,
        logit_bias=((favourite, -100.0), (40, 100.0)),
        allowed_token_ids=(40, 41),
    )
    (token,) = Sampler(VOCAB_SIZE, (EOS,)).sample(logits, [asked])
    raw = logits.log_softmax(1)[0]
    assert token.token_id == 40
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(raw[40]), abs=1e-5)
    assert token.logprobs.rank == 1 + int((logits[0] > logits[0, 40]).sum())
    assert token.logprobs.top[0][0] == favourite
    assert token.logprobs.top[0][1] == pytest.approx(float(raw[favourite]), abs=1e-5)


def test_logprobs_only_where_asked() -> None:
    rows = [row(), row(logprobs=0), row(logprobs=4)]
    nothing, alone, four = Sampler(VOCAB_SIZE, (EOS,)).sample(logits_of(3), rows)
    assert nothing.logprobs is None
    assert alone.logprobs is not None
    assert alone.logprobs.top == ()
    assert four.logprobs is not None
    assert len(four.logprobs.top) == 4


def test_a_row_of_nan_does_not_touch_the_others() -> None:
    rows, logits = mixed_rows(24), logits_of(24)
    wanted = draw(logits, *rows)
    for bad in range(24):
        broken = logits.clone()
        broken[bad] = torch.nan
        found = draw(broken, *rows)
        assert 0 <= found[bad] < VOCAB_SIZE
        assert found[:bad] + found[bad + 1 :] == wanted[:bad] + wanted[bad + 1 :]


def test_shapes_are_checked() -> None:
    sampler = Sampler(VOCAB_SIZE, (EOS,))
    assert sampler.sample(torch.empty(0, VOCAB_SIZE), []) == []
    with pytest.raises(ValueError, match="2 rows"):
        sampler.sample(logits_of(3), [row(), row()])
    with pytest.raises(ValueError, match="vocabulary of 5000"):
        sampler.sample(torch.zeros(1, 10), [row()])
