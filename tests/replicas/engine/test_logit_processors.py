"""Bias, masks and penalties against hand computation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from replicas.core.sampling_params import SamplingParams
from replicas.engine.logit_processors import SampleRow, changes_logits, process

EOS = (7,)
VOCAB_SIZE = 8


def row(
    output_index: int = 3,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    **sampling: Any,
) -> SampleRow:
    params = SamplingParams(max_tokens=100, seed=0, **sampling)
    return SampleRow(params, 0, output_index, prompt, output)


def processed(*rows: SampleRow) -> list[list[float]]:
    scores = ramp(len(rows))
    process(scores, rows, EOS)
    return scores.tolist()


def ramp(rows: int) -> Tensor:
    """Logits -3 .. 4."""
    return torch.arange(-3.0, 5.0).repeat(rows, 1)


PLAIN = ramp(1)[0].tolist()


def test_only_allowed_tokens_stay() -> None:
    (found,) = processed(row(allowed_token_ids=(6, 1)))
    assert [token for token, score in enumerate(found) if score > -math.inf] == [1, 6]
    assert (found[1], found[6]) == (-2.0, 3.0)


def test_bias_is_added_and_stays_finite() -> None:
    (found,) = processed(row(logit_bias=((0, 100.0), (7, -100.0), (3, 0.5))))
    assert found == [97.0, -2.0, -1.0, 0.5, 1.0, 2.0, 3.0, -96.0]


def test_bias_cannot_bring_back_what_is_not_allowed() -> None:
    (found,) = processed(row(allowed_token_ids=(1,), logit_bias=((2, 100.0), (1, 1.0))))
    assert found[2] == -math.inf
    assert found[1] == -1.0


@pytest.mark.parametrize(("output_index", "banned"), [(0, {2, 7}), (4, {2, 7}), (5, set())])
def test_min_tokens_bans_ends_until_reached(output_index: int, banned: set[int]) -> None:
    asked = row(output_index, min_tokens=5, stop_token_ids=(2,), logit_bias=((7, 100.0),))
    (found,) = processed(asked)
    assert {token for token, score in enumerate(found) if score == -math.inf} == banned


def test_ignored_eos_is_no_end() -> None:
    (found,) = processed(row(0, min_tokens=5, stop_token_ids=(2,), ignore_eos=True))
    assert {token for token, score in enumerate(found) if score == -math.inf} == {2}


def test_something_is_left_where_only_ends_are_allowed() -> None:
    asked = {"min_tokens": 5, "stop_token_ids": (2,)}
    only_ends, one_more = processed(
        row(0, allowed_token_ids=(2, 7), **asked), row(0, allowed_token_ids=(2, 5, 7), **asked)
    )
    assert {token for token, score in enumerate(only_ends) if score > -math.inf} == {2, 7}
    assert {token for token, score in enumerate(one_more) if score > -math.inf} == {5}


def test_repetition_penalty_divides_positive_and_multiplies_negative() -> None:
    (found,) = processed(row(repetition_penalty=2.0, prompt=(0, 3, 6, 6), output=(7, 1, 7)))
    assert found == [-6.0, -4.0, -1.0, 0.0, 1.0, 2.0, 1.5, 2.0]


def test_presence_and_frequency_count_the_output_only() -> None:
    (found,) = processed(
        row(presence_penalty=0.5, frequency_penalty=0.25, prompt=(0, 1), output=(4, 6, 4, 4))
    )
    wanted = list(PLAIN)
    wanted[4] -= 0.5 + 3 * 0.25
    wanted[6] -= 0.5 + 0.25
    assert found == wanted


def test_negative_penalties_reward() -> None:
    (found,) = processed(row(presence_penalty=-1.0, frequency_penalty=-0.5, output=(4, 4)))
    assert found[4] == PLAIN[4] + 2.0


def test_order_is_bias_then_repetition_then_presence() -> None:
    (found,) = processed(
        row(logit_bias=((4, 3.0),), repetition_penalty=2.0, presence_penalty=0.5, output=(4,))
    )
    assert found[4] == (1.0 + 3.0) / 2.0 - 0.5


def test_rows_do_not_touch_each_other() -> None:
    rows = [
        row(logit_bias=((0, 1.0),)),
        row(),
        row(0, min_tokens=1),
        row(repetition_penalty=2.0, output=(0,)),
        row(presence_penalty=1.0, output=(7,)),
        row(allowed_token_ids=(5,)),
    ]
    assert processed(*rows) == [processed(one)[0] for one in rows]
    assert processed(*rows)[1] == PLAIN


def test_ids_outside_the_vocabulary_are_passed_over() -> None:
    outside = (-1, VOCAB_SIZE, 10**12)
    rows = [
        row(),
        row(
            0,
            allowed_token_ids=(5, *outside),
            logit_bias=tuple((token, 100.0) for token in outside),
            min_tokens=1,
            stop_token_ids=outside,
            repetition_penalty=2.0,
            presence_penalty=1.0,
            prompt=outside,
            output=outside,
        ),
        row(),
    ]
    found = processed(*rows)
    assert found[0] == found[2] == PLAIN
    assert [score for score in found[1] if score > -math.inf] == [PLAIN[5]]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (row(), False),
        (row(temperature=0.5, top_k=3, stop_token_ids=(1,), logprobs=3), False),
        (row(3, min_tokens=3), False),
        (row(2, min_tokens=3), True),
        (row(logit_bias=((1, 1.0),)), True),
        (row(allowed_token_ids=(1,)), True),
        (row(repetition_penalty=1.1), True),
        (row(frequency_penalty=-0.1), True),
        (row(presence_penalty=0.1), True),
    ],
)
def test_which_rows_need_processing(asked: SampleRow, expected: bool) -> None:
    assert changes_logits(asked) is expected
