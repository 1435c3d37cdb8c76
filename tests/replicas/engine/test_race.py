"""Tokens are drawn with their probabilities, by the strongest of all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from replicas.engine import noise
from replicas.engine.noise import Words, key_tensor, of_tokens, row_key
from replicas.engine.race import best, best_of_all
from tests.replicas.engine import sampling_reference as reference
from tests.replicas.engine.sampling_cases import score_rows

Keys = list[Words]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def among_all(scores: Tensor, keys: Keys, temperature: float = 1.0) -> list[int]:
    """From scores [V] or [R, V], at R keys."""
    matrix = scores.expand(len(keys), -1)
    column = torch.full((len(keys),), temperature)
    found: list[int] = best_of_all(matrix, column, key_tensor(keys, scores.device)).tolist()
    return found


def among_few(scores: Tensor, keys: Keys, temperature: float = 1.0) -> list[int]:
    matrix = scores.expand(len(keys), -1)
    column = torch.full((len(keys),), temperature)
    ids = torch.arange(matrix.shape[1]).expand_as(matrix)
    found: list[int] = best(matrix, ids, column, key_tensor(keys, scores.device)).tolist()
    return found


def keys_of(count: int, over: str = "output indices", seed: int = 0) -> Keys:
    places: dict[str, Callable[[int], Words]] = {
        "seeds": lambda n: row_key(1000 * seed + n, 0, 0),
        "choices": lambda n: row_key(seed, n, 5),
        "output indices": lambda n: row_key(seed, 0, n),
    }
    return [places[over](n) for n in range(count)]


OVER = pytest.mark.parametrize("over", ["seeds", "choices", "output indices"])
WAYS = pytest.mark.parametrize("way", [among_all, among_few])
Way = Callable[[Tensor, Keys], list[int]]


@settings(max_examples=80, deadline=None)
@given(
    scores=score_rows(),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([1e-30, 1e-7, 0.1, 1.0, 50.0]),
)
def test_equals_the_reference(scores: Tensor, seed: int, temperature: float) -> None:
    keys = [row_key(seed, 0, n) for n in range(3)]
    wanted = [reference.drawn(scores, range(len(scores)), temperature, key) for key in keys]
    assert among_all(scores, keys, temperature) == wanted
    assert among_few(scores, keys, temperature) == wanted
    assert among_all(scores, keys[:1], temperature) == wanted[:1]


@pytest.mark.parametrize("vocab_size", [151_936, 152_001])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_huge_vocabularies(vocab_size: int, scale: float) -> None:
    scores = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)) * scale
    keys = keys_of(2)
    wanted = [reference.drawn(scores, range(vocab_size), 1.0, key) for key in keys]
    assert among_all(scores, keys) == wanted


def chi_square(drawn: list[int], probabilities: Tensor) -> float:
    seen = torch.bincount(torch.tensor(drawn), minlength=len(probabilities))
    expected = probabilities * len(drawn)
    return float(((seen - expected) ** 2 / expected).sum())


@OVER
@WAYS
def test_draws_follow_the_distribution(over: str, way: Way) -> None:
    """99 degrees of freedom: 170 is exceeded once in 90,000 tries."""
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    probabilities = (1.0 / torch.arange(2.0, 102.0))[order]
    probabilities /= probabilities.sum()
    assert chi_square(way(probabilities.log(), keys_of(20_000, over)), probabilities) < 170


@OVER
def test_draws_follow_a_steep_distribution(over: str) -> None:
    """9 degrees of freedom: 45 is exceeded once in a million tries."""
    probabilities = torch.full((200,), 1e-30)
    places = [3, 5, 30, 31, 32, 64, 100, 101, 150, 199]
    probabilities[places] = torch.tensor(
        [0.9, 0.05, 0.02, 0.01, 0.01, 4e-3, 3e-3, 1e-3, 1e-3, 1e-3]
    )
    drawn = among_all(probabilities.log(), keys_of(20_000, over))
    assert set(drawn) == set(places)
    assert chi_square([places.index(token) for token in drawn], probabilities[places]) < 45


@OVER
def test_unlikely_tokens_are_drawn_as_often_as_they_should(over: str) -> None:
    """Half of the weight lies on one of 50,000 tokens; the others' parts are equally likely."""
    scores = torch.zeros(50_000)
    scores[777] = torch.tensor(49_999.0).log()
    drawn = among_all(scores, keys_of(4000, over))
    others = [token for token in drawn if token != 777]
    assert abs(len(others) - 2000) < 5 * 1000**0.5
    assert chi_square([token // 1000 for token in others], torch.full((50,), 1 / 50)) < 110


@OVER
@pytest.mark.parametrize("apart", [1, 2, 16])
def test_draws_at_neighbouring_places_are_independent(over: str, apart: int) -> None:
    """15 degrees of freedom: 50 is exceeded once in 80,000 tries."""
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    drawn = among_all(probabilities.log(), keys_of(20_000, over))
    pairs = [4 * one + other for one, other in zip(drawn, drawn[apart:], strict=False)]
    assert chi_square(pairs, torch.outer(probabilities, probabilities).flatten()) < 50


@WAYS
def test_equals_at_a_tiny_temperature_go_to_the_lowest_id(way: Callable[..., list[int]]) -> None:
    scores = torch.zeros(500)
    scores[[70, 71, 450]] = 1.0
    assert set(way(scores, keys_of(50), 1e-30)) == {70}


@WAYS
@pytest.mark.parametrize("survivor", [0, 31, 32, 999])
def test_one_survivor(way: Way, survivor: int) -> None:
    scores = torch.full((1000,), -torch.inf)
    scores[survivor] = -50.0
    assert set(way(scores, keys_of(300))) == {survivor}
    assert way(scores, keys_of(1)) == [survivor]


def test_survivors_that_lead_no_group() -> None:
    scores = torch.full((3000,), -torch.inf)
    scores[[40, 41, 2999]] = 0.0
    keys = keys_of(300)
    assert among_all(scores, keys) == [
        reference.drawn(scores, [40, 41, 2999], 1.0, key) for key in keys
    ]


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_row_without_scores_gives_the_first_token(bad: float) -> None:
    scores = torch.randn(4, 1000, generator=torch.Generator().manual_seed(2))
    keys = keys_of(4)
    wanted = among_all(scores, keys)
    scores[2] = bad
    assert among_all(scores, keys) == [*wanted[:2], 0, wanted[3]]
    assert among_all(scores[2:3], keys[2:3]) == [0]


def test_rows_do_not_depend_on_each_other() -> None:
    scores = torch.randn(40, 5000, generator=torch.Generator().manual_seed(3))
    temperature = torch.logspace(-1, 2, 40)
    keys = key_tensor(keys_of(40), scores.device)
    together = best_of_all(scores, temperature, keys)
    for part in [slice(n, n + 1) for n in range(40)] + [slice(7, 23)]:
        assert torch.equal(best_of_all(scores[part], temperature[part], keys[part]), together[part])
    assert len(set(together.tolist())) > 20


@pytest.mark.parametrize("kind", ["zipf", "flat", "steep", "sparse", "masked"])
def test_only_some_groups_are_looked_at(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a draw would take far longer than the passes over the vocabulary it replaces."""
    generator = torch.Generator().manual_seed(4)
    order = torch.randperm(49_152, generator=generator)
    scores = {
        "zipf": -torch.arange(1.0, 49_153).log(),
        "flat": torch.zeros(49_152),
        "steep": -3 * torch.arange(1.0, 49_153).log(),
        "sparse": torch.full((49_152,), -torch.inf).index_fill(0, torch.arange(3), 0.0),
        "masked": torch.full((49_152,), -torch.inf),
    }[kind][order]
    looked_at = 0

    def counting(keys: Tensor, token_ids: Tensor) -> Tensor:
        nonlocal looked_at
        looked_at += token_ids.numel()
        return of_tokens(keys, token_ids)

    monkeypatch.setattr(noise, "of_tokens", counting)
    among_all(scores, keys_of(50))
    assert looked_at / 50 < 49_152 / 20
