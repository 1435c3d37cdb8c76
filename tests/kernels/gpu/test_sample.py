"""The very tokens that the CPU sampler draws, from the very tokens that it keeps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.gpu.sample import SampleParams, sample, scratch_for
from kernels.gpu.sample_candidates import CAPACITY
from kernels.gpu.sample_math import NO_LIMIT, SEGMENT
from replicas.core.sampling_params import SamplingParams
from replicas.engine.draw_params import DrawParams
from replicas.engine.logit_processors import SampleRow
from replicas.engine.sampler import Sampler
from tests.replicas.engine import sampling_reference as reference

CPU = torch.device("cpu")
# Infinite scores and ranges that end in infinity are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def params_of(rows: Sequence[SampleRow], vocab_size: int) -> SampleParams:
    params = DrawParams.of(rows, vocab_size, CPU)
    greedy = torch.tensor([row.sampling.temperature == 0 for row in rows], dtype=torch.bool)
    return SampleParams(
        temperature=params.temperature.masked_fill(greedy, 0),
        top_k=params.top_k.int(),
        top_p=params.top_p,
        min_p=params.min_p,
        keys=params.keys.flatten(1).int(),
    )


def poisoned(rows: int) -> dict[str, Tensor]:
    """Scratch memory with anything in it."""
    scratch = scratch_for(rows, CPU)
    for tensor in scratch.values():
        tensor.view(torch.uint8).random_(256)
    return scratch


def draw(logits: Tensor, sampling: Sequence[SamplingParams]) -> tuple[list[int], list[set[int]]]:
    """By row, the token and what was kept: all of the vocabulary where there are no limits.

    Asserts that tokens are the CPU's.
    """
    rows = [SampleRow(params, index % 3, 7 * index) for index, params in enumerate(sampling)]
    vocab_size = logits.shape[1]
    scratch = poisoned(len(rows))
    tokens: list[int] = sample(logits, params_of(rows, vocab_size), scratch=scratch).tolist()
    on_cpu = Sampler(vocab_size, ()).sample(logits, rows)
    assert tokens == [token.token_id for token in on_cpu]
    reach = ranks(logits) >= scratch["thresholds"][:, None]
    return tokens, [set(row.nonzero()[:, 0].tolist()) for row in reach]


def ranks(logits: Tensor) -> Tensor:
    """As `sample_math` defines them, without its tricks: [B, V] int64."""
    keys = logits.abs().view(torch.int32).long()
    keys = torch.where(logits < 0, -1 - keys, keys)
    return keys * 2**18 + 2**18 - 1 - torch.arange(logits.shape[1])


def limited(params: SamplingParams, vocab_size: int) -> bool:
    if params.temperature == 0:
        return False
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def random_row(vocab_size: int, choose: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(choose.randrange(2**32))
    scores = torch.randn(vocab_size, generator=generator) * choose.choice([0.1, 1, 3, 1e4])
    kind = choose.choice(["smooth", "smooth", "ties", "equal", "masked"])
    if kind == "ties":
        return (scores * 2).round() / 2
    if kind == "equal":
        return torch.full((vocab_size,), 1.5)
    if kind == "masked":
        mask = torch.rand(vocab_size, generator=generator) < 0.7
        mask[choose.randrange(vocab_size)] = False
        return scores.masked_fill(mask, -torch.inf)
    return scores


def random_params(choose: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=9,
        seed=choose.randrange(2**64),
        temperature=choose.choice([0.0, 1e-40, 1e-7, 0.01, 0.3, 1.0, 1.0, 2.0, 50.0]),
        top_k=choose.choice([0, 0, 1, 2, 5, 40, 600, 10_000_000]),
        top_p=choose.choice([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0]),
        min_p=choose.choice([0.0, 0.0, 0.0, 1e-6, 0.05, 0.5, 1.0]),
    )


@pytest.mark.parametrize(
    ("vocab_size", "count"), [(1, 2), (31, 8), (32, 8), (100, 8), (1000, 24), (5003, 16)]
)
def test_random_rows(vocab_size: int, count: int) -> None:
    choose = random.Random(vocab_size)
    logits = torch.stack([random_row(vocab_size, choose) for _ in range(count)])
    sampling = [random_params(choose) for _ in range(count)]
    _, kept = draw(logits, sampling)
    for index, params in enumerate(sampling):
        if limited(params, vocab_size):
            assert kept[index] == set(reference.kept(logits[index], params)), params


def test_ties_at_the_limits_go_to_the_lowest_ids() -> None:
    vocab_size = SEGMENT.value + 100
    logits = torch.zeros(5, vocab_size)
    logits[:, 17] = 1.0
    logits[:, 4000:] = 1.0
    sampling = [
        SamplingParams(9, 1, top_k=60),
        SamplingParams(9, 2, top_k=197 + 55),
        SamplingParams(9, 3, top_k=101, top_p=0.5),
        SamplingParams(9, 4, top_p=0.01),
        SamplingParams(9, 5, min_p=0.9),
    ]
    _, kept = draw(logits, sampling)
    high = [17, *range(4000, vocab_size)]
    low = [token for token in range(4000) if token != 17]
    assert kept[0] == set(high[:60])
    assert kept[1] == {*high, *low[:55]}
    assert kept[2] == set(high[:51])
    assert kept[3] == set(reference.kept(logits[3], sampling[3]))
    assert kept[4] == set(high)


def test_noise_decides_between_two_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    draw(
        torch.rand(40, 2, generator=generator) * 4, [SamplingParams(9, seed) for seed in range(40)]
    )


def test_where_noise_is_nearly_lost_the_lowest_id_of_equals_wins() -> None:
    """The score over the temperature is some 8e15, where float64 has steps of 1."""
    sampling = [SamplingParams(9, seed, temperature=1.9e-16) for seed in range(256, 272)]
    # Leaders that do not run make groups come in another order than that of what they reach.
    runs = torch.rand(16, 700, generator=torch.Generator().manual_seed(0)) < 0.5
    draw(torch.where(runs, 1.5, 0.0), sampling)


def test_half_is_reached_by_one_of_two_equals() -> None:
    logits = torch.tensor([[0.0, -0.0, -torch.inf], [-0.0, 0.0, -torch.inf]])
    tokens, kept = draw(logits, [SamplingParams(9, seed, top_p=0.5) for seed in (1, 2)])
    assert (tokens, kept) == ([0, 0], [{0}, {0}])


def test_more_candidates_than_are_listed() -> None:
    """A row that is flat to the last bit, and one whose limit falls among very many tokens."""
    vocab_size = CAPACITY.value + 300
    flat = torch.full((vocab_size,), -3.25)
    near = flat + torch.rand(vocab_size, generator=torch.Generator().manual_seed(0)) * 1e-4
    near[70] = 4.0
    sampling = [
        SamplingParams(9, 1, top_p=0.5),
        SamplingParams(9, 2, top_k=7777, top_p=0.25),
        SamplingParams(9, 3, top_k=9001),
    ]
    _, kept = draw(torch.stack((flat, flat, near)), sampling)
    assert kept[0] == set(range((vocab_size + 1) // 2))
    assert kept[1] == set(range(1945))
    assert kept[2] == set(reference.kept(near, sampling[2]))


def test_the_largest_vocabulary() -> None:
    logits = torch.zeros(2, 2**18)
    logits[:, -1] = 9.0
    logits[:, -3] = 9.0
    sampling = [SamplingParams(9, 0, temperature=0), SamplingParams(9, 3, top_k=2)]
    tokens, kept = draw(logits, sampling)
    assert tokens[0] == 2**18 - 3
    assert kept[1] == {2**18 - 3, 2**18 - 1}
    with pytest.raises(ValueError, match="the limit is 262144"):
        sample(torch.zeros(2, 2**18 + 1), params_of([SampleRow(s, 0, 0) for s in sampling], 9))


def test_rows_without_a_likeliest_token_leave_the_others_alone() -> None:
    logits = torch.randn(6, 70, generator=torch.Generator().manual_seed(0))
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 5] = torch.inf
    logits[4, ::2] = torch.nan
    for sampling in (
        SamplingParams(9, 1, temperature=0),
        SamplingParams(9, 1),
        SamplingParams(9, 1, top_k=3, top_p=0.9, min_p=0.1),
    ):
        rows = [SampleRow(sampling, 0, index) for index in range(6)]
        tokens = sample(logits, params_of(rows, 70), scratch=poisoned(6)).tolist()
        on_cpu = Sampler(70, ()).sample(logits, rows)
        assert [tokens[0], tokens[5]] == [on_cpu[0].token_id, on_cpu[5].token_id]
        assert all(0 <= token < 70 for token in tokens)
        assert tokens[4] % 2 == 1  # not a NaN, as there is something else


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    choose = random.Random(5)
    logits = torch.stack([random_row(300, choose) for _ in range(4)])
    rows = [SampleRow(random_params(choose), 0, 0) for _ in range(4)]
    together = sample(logits, params_of(rows, 300), out=torch.full((4,), -7))
    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1], params_of([row], 300), scratch=poisoned(1))
        assert alone.tolist() == together[index : index + 1].tolist()


def test_no_limits_keep_all() -> None:
    logits = torch.tensor([[0.0, -90.0, -torch.inf]])
    scratch = poisoned(1)
    sample(logits, params_of([SampleRow(SamplingParams(9, 1), 0, 0)], 3), scratch=scratch)
    assert scratch["thresholds"].tolist() == [NO_LIMIT.value]
    assert sample(logits[:0], params_of([], 3)).tolist() == []


def test_what_does_not_fit_is_refused() -> None:
    logits = torch.zeros(2, 40)
    params = params_of([SampleRow(SamplingParams(9, 1), 0, 0)] * 2, 40)
    wrong = replace(params, top_p=params.top_p.float())
    for name, call in {
        "logits": lambda: sample(logits.half(), params),
        "temperature": lambda: sample(logits[:1], params),
        "top_p": lambda: sample(logits, wrong),
        "out": lambda: sample(logits, params, out=torch.zeros(2)),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}:"):
            call()
