"""The noise keeps to its contract, and is exponential and independent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from replicas.engine.noise import Words, key_tensor, of_leaders, of_tokens, philox, row_key
from tests.replicas.engine import sampling_reference as reference

ONES = 0xFFFF_FFFF
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_known_answers(counter: Words, key: tuple[int, int], expected: Words) -> None:
    assert philox(counter, key) == expected


def test_each_input_counts() -> None:
    seeds = [0, 1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1]
    keys = {row_key(s, c, i) for s in seeds for c in range(10) for i in range(100)}
    assert len(keys) == len(seeds) * 10 * 100


def test_seed_is_key_and_place_is_counter() -> None:
    seed, choice, index = 0x0123_4567_89AB_CDEF, 3, 1000
    wanted = philox((choice, index, 0, 0), (0x89AB_CDEF, 0x0123_4567))
    assert row_key(seed, choice, index) == wanted


def noise_of(places: list[tuple[int, int, int]], token_ids: range) -> Tensor:
    """[R, C]; places are (seed, choice, output index)."""
    keys = key_tensor([row_key(*place) for place in places], CPU)
    return of_tokens(keys, torch.tensor(token_ids).repeat(len(places), 1))


def test_noise_is_that_of_the_contract() -> None:
    keys = [row_key(n, n % 3, n) for n in range(20)]
    keys += [(0, 0, 0, 0), (ONES, ONES, ONES, ONES), (0, ONES, 0, ONES)]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 200_000, (len(keys), 300), generator=generator)
    ids[:, :64] = torch.arange(64)
    found = of_tokens(key_tensor(keys, CPU), ids)
    wanted = [
        [reference.noise(key, token) for token in line]
        for key, line in zip(keys, ids.tolist(), strict=True)
    ]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-14, atol=0)
    assert bool((found > 0).all())


def test_noise_of_a_known_token() -> None:
    """Fixed for good: other values would draw other tokens for the same seed."""
    key = row_key(4, 0, 20)
    assert reference.noise(key, 22977) == pytest.approx(0.27885137550768524, rel=1e-12)
    assert reference.noise(key, 22970) == pytest.approx(2.4064341947985706, rel=1e-12)


def test_leaders_have_the_least_noise_of_their_groups() -> None:
    keys = key_tensor([row_key(n, 0, 0) for n in range(50)], CPU)
    least, leaders = of_leaders(keys, 100)
    groups = of_tokens(keys, torch.arange(3200).repeat(50, 1)).unflatten(1, (100, 32))
    found = groups.min(2)
    assert torch.equal(found.indices + 32 * torch.arange(100), leaders)
    torch.testing.assert_close(found.values, least, rtol=1e-14, atol=0)


SEEDS = [(n, 0, 0) for n in range(5000)]
CHOICES = [(7, n, 0) for n in range(5000)]
INDICES = [(7, 0, n) for n in range(5000)]
PLACES = pytest.mark.parametrize(
    "places", [SEEDS, CHOICES, INDICES], ids=["seeds", "choices", "indices"]
)


def bins(noise: Tensor, count: int) -> Tensor:
    """Equally likely ones of a number that is exponential with mean 1."""
    return (-noise.neg().expm1() * count).long().clamp_(max=count - 1)


def chi_square(cells: Tensor, count: int) -> float:
    """Of the hypothesis that all cells are equally likely."""
    expected = cells.numel() / count
    seen = torch.bincount(cells.flatten(), minlength=count)
    return float(((seen - expected) ** 2 / expected).sum())


@PLACES
@pytest.mark.parametrize("token_id", [0, 31, 65_536, 151_000])
def test_one_token_at_many_places(places: list[tuple[int, int, int]], token_id: int) -> None:
    """63 degrees of freedom: 125 is exceeded once in 200,000 tries."""
    noise = noise_of(places, range(token_id, token_id + 1))
    assert chi_square(bins(noise, 64), 64) < 125
    assert float(noise.mean()) == pytest.approx(1, abs=0.07)


@pytest.mark.parametrize("place", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**63, 9, 500)])
def test_all_tokens_at_one_place(place: tuple[int, int, int]) -> None:
    noise = noise_of([place], range(151_936))
    assert chi_square(bins(noise, 64), 64) < 125
    for power in range(4, 13):
        expected = 151_936 * 2.0**-power
        assert abs(int((noise < 2.0**-power).sum()) - expected) < 5 * expected**0.5


@pytest.mark.parametrize("apart", [1, 2, 31, 32, 33, 64, 1024, 65_536])
def test_neighbouring_tokens_are_independent(apart: int) -> None:
    noise = noise_of([(5, 0, n) for n in range(5)], range(100_000))
    pairs = bins(noise[:, :-apart], 8) * 8 + bins(noise[:, apart:], 8)
    assert chi_square(pairs, 64) < 125


@PLACES
@pytest.mark.parametrize("apart", [1, 2, 16])
def test_neighbouring_places_are_independent(
    places: list[tuple[int, int, int]], apart: int
) -> None:
    noise = noise_of(places, range(1000, 1020))
    pairs = bins(noise[:-apart], 8) * 8 + bins(noise[apart:], 8)
    assert chi_square(pairs, 64) < 125


@PLACES
def test_each_token_leads_as_often_whatever_the_noise(places: list[tuple[int, int, int]]) -> None:
    """255 degrees of freedom: 370 is exceeded once in 300,000 tries."""
    least, leaders = of_leaders(key_tensor([row_key(*place) for place in places], CPU), 20)
    assert chi_square(leaders % 32 * 8 + bins(least * 32, 8), 256) < 370


@PLACES
def test_least_noise_is_independent_of_that_of_a_neighbouring_group(
    places: list[tuple[int, int, int]],
) -> None:
    least, leaders = of_leaders(key_tensor([row_key(*place) for place in places], CPU), 20)
    cells = bins(least * 32, 8)
    assert chi_square(cells[:, :-1] * 8 + cells[:, 1:], 64) < 125
    places_in_groups = leaders % 32 // 4
    assert chi_square(places_in_groups[:, :-1] * 8 + places_in_groups[:, 1:], 64) < 125
