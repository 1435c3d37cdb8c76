"""Scores are changed bit for bit as the engine's logit processors change them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.gpu.allow_only import allow_only, allowed_words
from kernels.gpu.edit_scores import edit_scores
from replicas.core.sampling_params import SamplingParams
from replicas.engine.logit_processors import SampleRow, process

VOCAB = 2100


def edits_of(row: SampleRow) -> dict[int, tuple[float, float, float]]:
    """By token: bias, penalty, addend."""
    params = row.sampling
    bias = dict(params.logit_bias)
    seen = {*row.prompt_token_ids, *row.output_token_ids}
    edits = {}
    for token in {*bias, *seen}:
        count = row.output_token_ids.count(token)
        addend = -(params.presence_penalty + params.frequency_penalty * count) if count else 0.0
        penalty = params.repetition_penalty if token in seen else 1.0
        edits[token] = (bias.get(token, 0.0), penalty, addend)
    return edits


def random_case(choose: random.Random) -> SampleRow:
    def tokens(count: int) -> list[int]:
        return [choose.randrange(VOCAB) for _ in range(count)]

    params = SamplingParams(
        max_tokens=9,
        seed=0,
        repetition_penalty=choose.choice([1.0, 1.3, 0.7]),
        presence_penalty=choose.choice([0.0, 0.3, -1.1]),
        frequency_penalty=choose.choice([0.0, 0.7]),
        logit_bias=tuple((t, choose.choice([0.1, -100.0, -torch.inf])) for t in tokens(20)),
    )
    return SampleRow(params, 0, 3, tokens(60), tokens(30) * 2)


def test_bias_and_penalties() -> None:
    choose = random.Random(3)
    rows = [random_case(choose) for _ in range(4)]
    scores = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)) * 10
    expected = scores.clone()
    process(expected[:4], rows, ())
    flat = [
        (index, token, *edit)
        for index, row in enumerate(rows)
        for token, edit in edits_of(row).items()
    ]
    # What is padding or outside of the vocabulary changes nothing.
    flat += [(-1, 5, 9.0, 9.0, 9.0), (1, VOCAB, 9.0, 9.0, 9.0), (1, -3, 9.0, 9.0, 9.0)]
    choose.shuffle(flat)
    assert len(flat) > 128
    columns = [torch.tensor(column) for column in zip(*flat, strict=True)]
    edit_scores(scores, columns[0].int(), columns[1].int(), *columns[2:])
    assert torch.equal(scores, expected)


@pytest.mark.parametrize("vocab_size", [1, 31, 64, VOCAB])
def test_only_allowed_tokens_stay(vocab_size: int) -> None:
    choose = random.Random(vocab_size)
    allowed = [tuple(choose.randrange(vocab_size) for _ in range(40)), (vocab_size - 1, -1, 10**6)]
    scores = torch.randn(3, vocab_size)
    expected = scores.clone()
    rows = [SampleRow(SamplingParams(9, 0, allowed_token_ids=ids), 0, 0) for ids in allowed]
    for index, row in zip((2, 0), rows, strict=True):
        process(expected[index : index + 1], [row], ())
    words = [allowed_words(ids, vocab_size) for ids in allowed]
    words.append(np.zeros_like(words[0]))
    allow_only(scores, torch.tensor([2, 0, -1], dtype=torch.int32), torch.tensor(np.stack(words)))
    assert torch.equal(scores, expected)


def test_what_does_not_fit_is_refused() -> None:
    scores, rows = torch.zeros(2, 64), torch.zeros(3, dtype=torch.int32)
    words, values = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3)

    def edit(scores: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
        edit_scores(scores, rows, token_ids, values, values, values)

    for name, call in {
        "scores": lambda: allow_only(scores.half(), rows, words),
        "rows": lambda: allow_only(scores, rows.long(), words),
        "words": lambda: allow_only(scores, rows, words[:, :1]),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}:"):
            call()
    for name, call in {
        "scores": lambda: edit(scores[:, ::2], rows, rows, values),
        "rows": lambda: edit(scores, rows.long(), rows, values),
        "token_ids": lambda: edit(scores, rows, rows[:2], values),
        "biases": lambda: edit(scores, rows, rows, values.double()),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}:"):
            call()
    allow_only(scores, rows[:0], words[:0])
    edit(scores, rows[:0], rows[:0], values[:0])
    assert not scores.any()
