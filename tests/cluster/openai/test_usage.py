"""What the usage object makes of receipts."""

from __future__ import annotations

import pytest

from cluster.journal import Journal
from cluster.openai.usage import usage
from cluster.tokenizer import Tokenizer
from replicas.core.sampling_params import SamplingParams
from replicas.protocol import FinishReason, GenerateRequest, Receipt, TokenDelta


def journal_of(tokenizer: Tokenizer, *receipts: Receipt | None) -> Journal:
    """A finished prompt of three tokens, a token a choice."""
    request = GenerateRequest("r", (5, 6, 7), SamplingParams(max_tokens=1, seed=1), n=len(receipts))
    journal = Journal(request, tokenizer)
    for index, receipt in enumerate(receipts):
        delta = TokenDelta("r", index, (40,), finish_reason=FinishReason.LENGTH, receipt=receipt)
        journal.feed(delta)
    return journal


def test_costs_add_up_over_choices_and_prompts(tokenizer: Tokenizer) -> None:
    one = Receipt(preemptions=1, recomputed_tokens=2, restored_tokens=30, stall_s=0.25)
    two = Receipt(preemptions=3, recomputed_tokens=4, restored_tokens=50, stall_s=0.0005)
    told = usage([journal_of(tokenizer, one, two), journal_of(tokenizer, two)])
    assert (told["prompt_tokens"], told["completion_tokens"], told["total_tokens"]) == (6, 3, 9)
    assert told["quire"] == {
        "preemptions": 7,
        "mode": "recompute",
        "recomputed_tokens": 10,
        "restored_tokens": 130,
        "stall_ms": 251.0,
        "cached_tokens": 0,
        "host_cached_tokens": 0,
        "failovers": 0,
        "moves": 0,
    }


@pytest.mark.parametrize(
    ("receipts", "mode"),
    [
        ([(0, 0), (0, 0)], "none"),
        ([(2, 0), (0, 0)], "recompute"),
        ([(2, 2), (1, 1)], "swap"),
        ([(2, 1)], "mixed"),
        ([(1, 0), (1, 1)], "mixed"),
    ],
)
def test_the_mode_is_that_of_all_preemptions(
    tokenizer: Tokenizer, receipts: list[tuple[int, int]], mode: str
) -> None:
    every = [Receipt(preemptions=preemptions, swaps=swaps) for preemptions, swaps in receipts]
    assert usage([journal_of(tokenizer, *every)])["quire"]["mode"] == mode


@pytest.mark.parametrize("others", [(0, 0), (1, 1), (9, 9)])
def test_a_prompt_was_cached_once_as_its_first_choice_found_it(
    tokenizer: Tokenizer, others: tuple[int, int]
) -> None:
    first, other = Receipt(cached_tokens=3, host_cached_tokens=2), Receipt(*others)
    told = usage([journal_of(tokenizer, first, other, other), journal_of(tokenizer, first)])
    assert told["prompt_tokens_details"] == {"cached_tokens": 10}
    assert told["quire"]["cached_tokens"] == 6
    assert told["quire"]["host_cached_tokens"] == 4


def test_a_receipt_that_never_came_counts_nothing(tokenizer: Tokenizer) -> None:
    told = usage([journal_of(tokenizer, None, Receipt(preemptions=1))])
    assert told["prompt_tokens_details"] == {"cached_tokens": 0}
    assert told["quire"]["preemptions"] == 1
