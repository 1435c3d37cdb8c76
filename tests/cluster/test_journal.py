"""The journal of one request only grows, whatever order and size its deltas come in."""

from __future__ import annotations

from typing import Any

from cluster.journal import Journal, TextOptions, Update
from cluster.tokenizer import Tokenizer
from replicas.core.sampling_params import SamplingParams
from replicas.protocol import (
    FinishReason,
    GenerateRequest,
    Receipt,
    TokenDelta,
    TokenLogprobs,
)

RECEIPT = Receipt(preemptions=3, swaps=2, recomputed_tokens=1, stall_s=4.0, queue_s=5.0)


def make_journal(
    tokenizer: Tokenizer, options: TextOptions | None = None, *, n: int = 1, **sampling: Any
) -> Journal:
    params = SamplingParams(max_tokens=50, seed=1, **sampling)
    return Journal(GenerateRequest("r", (5, 6, 7), params, n), tokenizer, options)


def ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def test_prompt_and_output_are_apart(tokenizer: Tokenizer) -> None:
    journal = make_journal(tokenizer)
    said = ids(tokenizer, "one two three")
    for token in said:
        journal.feed(TokenDelta("r", 0, (token,)))
    assert journal.request.prompt_token_ids == (5, 6, 7)
    assert journal.choices[0].output_token_ids == list(said)
    assert journal.completion_tokens == len(said)
    assert not journal.finished


def test_a_stop_string_asks_for_an_abort_and_settles_with_the_receipt(
    tokenizer: Tokenizer,
) -> None:
    journal = make_journal(tokenizer, TextOptions(stops=("two",)), n=2)
    one, two, three = ids(tokenizer, "one two three")
    (update,) = journal.feed(TokenDelta("r", 1, (one, two, three)))
    assert update == Update(1, "one ", (one, two), [], FinishReason.STOP, "two", abort=True)
    # What the engine said before it heard of the abort belongs to nobody.
    (late,) = journal.feed(TokenDelta("r", 1, (three,)))
    assert late.empty
    assert not late.token_ids
    assert journal.choices[1].output_token_ids == [one, two]
    journal.feed(TokenDelta("r", 0, (one,), finish_reason=FinishReason.LENGTH, receipt=RECEIPT))
    assert journal.finished
    assert not journal.settled
    journal.feed(TokenDelta("r", 1, (), finish_reason=FinishReason.ABORT, receipt=RECEIPT))
    assert journal.settled
    assert journal.choices[1].finish_reason is FinishReason.STOP
    assert [choice.receipt for choice in journal.choices] == [RECEIPT, RECEIPT]


def test_a_stop_string_with_the_last_token_needs_no_abort(tokenizer: Tokenizer) -> None:
    journal = make_journal(tokenizer, TextOptions(stops=("two",)))
    delta = TokenDelta("r", 0, ids(tokenizer, "one two"), finish_reason=FinishReason.LENGTH)
    (update,) = journal.feed(delta)
    assert (update.finish_reason, update.abort) == (FinishReason.STOP, False)
    assert journal.settled


def test_held_text_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    journal = make_journal(tokenizer, TextOptions(stops=("two four",)))
    one, two = ids(tokenizer, "one two")
    assert [u.text for u in journal.feed(TokenDelta("r", 0, (one,)))] == ["one"]
    assert [u.text for u in journal.feed(TokenDelta("r", 0, (two,)))] == [" "]
    end = TokenDelta("r", 0, (), finish_reason=FinishReason.LENGTH)
    assert [u.text for u in journal.feed(end)] == ["two"]


def test_other_choices_wait_for_the_prompts_logprobs(tokenizer: Tokenizer) -> None:
    options = TextOptions(echo=("a", "b", "c"))
    journal = make_journal(tokenizer, options, n=2, logprobs=0, prompt_logprobs=0)
    value = TokenLogprobs(-1.0, 1, ())
    assert journal.feed(TokenDelta("r", 1, (8,), (value,))) == []
    updates = journal.feed(TokenDelta("r", 0, (9,), (value,), prompt_logprobs=(value, value)))
    assert [update.choice for update in updates] == [1, 0]
    for update in updates:
        assert update.text.startswith("abc")
        assert [entry.offset for entry in update.entries] == [0, 1, 2, 3]
        assert [entry.logprobs for entry in update.entries] == [None, value, value, value]
    (next_update,) = journal.feed(TokenDelta("r", 1, (8,), (value,)))
    assert len(next_update.entries) == 1


def test_logprobs_of_a_character_that_is_never_finished(tokenizer: Tokenizer) -> None:
    journal = make_journal(tokenizer, logprobs=0)
    value = TokenLogprobs(-1.0, 1, ())
    half = ids(tokenizer, "a\U0001f336")[:2]
    updates = journal.feed(TokenDelta("r", 0, half, (value, value)))
    updates += journal.feed(TokenDelta("r", 0, (), finish_reason=FinishReason.LENGTH))
    text = "".join(update.text for update in updates)
    entries = [entry for update in updates for entry in update.entries]
    assert text == "a\ufffd"
    assert "".join(entry.text for entry in entries) == text
    assert [entry.offset for entry in entries] == [0, 1]
