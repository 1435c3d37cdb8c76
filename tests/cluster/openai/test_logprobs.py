"""The two shapes of logprobs."""

from __future__ import annotations

from cluster.openai.logprobs import (
    TokenEntry,
    chat_logprobs,
    legacy_logprobs,
    prompt_logprobs,
)
from cluster.tokenizer import Tokenizer
from replicas.protocol import TokenLogprobs


def half_a_chilli(tokenizer: Tokenizer) -> int:
    token_id = tokenizer.encode(" \U0001f336", add_special_tokens=False)[0]
    assert tokenizer.token_bytes(token_id) == b" \xf0\x9f"
    return token_id


def test_legacy_names_alternatives_that_are_no_text_by_their_bytes(tokenizer: Tokenizer) -> None:
    half, (other,) = half_a_chilli(tokenizer), tokenizer.encode("A", add_special_tokens=False)
    values = TokenLogprobs(-3.0, 3, ((half, -1.0), (other, -2.0)))
    entry = TokenEntry(500, "x", 7, values)
    assert legacy_logprobs([entry], tokenizer, 2) == {
        "tokens": ["x"],
        "token_logprobs": [-3.0],
        "top_logprobs": [{"x": -3.0, "bytes:\\x20\\xf0\\x9f": -1.0, "A": -2.0}],
        "text_offset": [7],
    }
    assert legacy_logprobs([entry], tokenizer, 0)["top_logprobs"] == [{"x": -3.0}]


def test_chat_has_bytes(tokenizer: Tokenizer) -> None:
    half = half_a_chilli(tokenizer)
    values = TokenLogprobs(-1.0, 1, ((half, -1.0),))
    (content,) = chat_logprobs([TokenEntry(half, "", 0, values)], tokenizer, 1)["content"]
    one = {"token": " \ufffd", "logprob": -1.0, "bytes": [32, 240, 159]}
    assert content == {**one, "top_logprobs": [one]}


def test_prompt_rows(tokenizer: Tokenizer) -> None:
    (a,), (b,) = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    rows = prompt_logprobs([a, b], [TokenLogprobs(-4.0, 9, ((a, -0.5), (b, -4.0)))], tokenizer, 1)
    assert rows == [
        None,
        {
            str(b): {"logprob": -4.0, "rank": 9, "decoded_token": "b"},
            str(a): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]
