"""Text piece by piece equals the text of all tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from cluster.openai.detokenizer import REPLACEMENT, Detokenizer
from cluster.tokenizer import Tokenizer

CHILLI = "\U0001f336\ufe0f"


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A small tokenizer in Llama's manner: spaces as U+2581, bytes as <0xNN>."""
    vocabulary = {"<s>": 0, "</s>": 1, "▁": 2, "▁Hello": 3, "▁world": 4, "ing": 5, "é": 6}
    vocabulary |= {f"<0x{byte:02X}>": 7 + byte for byte in range(256)}
    fast = FastTokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")
    )


def pieces(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def rare_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are no whole characters: rare among 49152, and they are what is hard."""
    texts = [tokenizer.token_text(i) for i in range(tokenizer.vocab_size)]
    return [i for i, text in enumerate(texts) if REPLACEMENT in text]


@settings(max_examples=150)
@given(data=st.data())
def test_pieces_joined_are_the_whole_text(
    tokenizer: Tokenizer, rare_ids: list[int], data: st.DataObject
) -> None:
    rare = st.sampled_from(rare_ids)
    ids = data.draw(st.lists(rare | st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    visible = [i for i in ids if i not in tokenizer.special_ids]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(visible)


@given(text=st.text(max_size=60))
def test_no_piece_of_a_sound_text_has_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    # Its vocabulary lacks a few bytes, and so some characters.
    assume(tokenizer.decode(ids) == text and REPLACEMENT not in text)
    assert not any(REPLACEMENT in piece for piece in pieces(tokenizer, ids))


@given(text=st.text(max_size=30), cut=st.integers(0, 60))
def test_prompt_and_output_meet_anywhere(tokenizer: Tokenizer, text: str, cut: int) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt, output = ids[:cut], ids[cut:]
    echo = Detokenizer(tokenizer, skips_special=False)
    before = "".join(map(echo.push, prompt))
    after = Detokenizer(tokenizer, prompt, shows_tail=True)
    shown = [*map(after.push, output), after.flush()]
    visible = [i for i in output if i not in tokenizer.special_ids]
    assert before + "".join(shown) == tokenizer.decode([*prompt, *visible])


def test_an_unfinished_prompt_is_finished_by_the_output(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world " + CHILLI, add_special_tokens=False)
    cut = next(i for i in range(len(ids)) if REPLACEMENT in tokenizer.decode(ids[:i]))
    assert "".join(pieces(tokenizer, ids[cut:], ids[:cut])) == CHILLI
    # What belongs to the prompt alone never comes back.
    other = tokenizer.encode(" and so on", add_special_tokens=False)
    assert "".join(pieces(tokenizer, other, ids[:cut])) == " and so on"
    assert pieces(tokenizer, [], ids[:cut]) == [""]


def test_special_tokens_are_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b", add_special_tokens=False)
    assert len(ids) == 3
    assert "".join(pieces(tokenizer, ids)) == "ab"


EURO = [7 + byte for byte in "€".encode()]
UNITS = st.sampled_from([[2], [3], [4], [5], [6], EURO, [7 + ord("x")]])


@given(units=st.lists(UNITS, max_size=8))
def test_sentencepiece_pieces_joined(sentencepiece: Tokenizer, units: list[list[int]]) -> None:
    ids = [i for unit in units for i in unit]
    assert "".join(pieces(sentencepiece, ids)) == sentencepiece.decode(ids)


def test_sentencepiece_spaces(sentencepiece: Tokenizer) -> None:
    hello, world, ing = 3, 4, 5
    assert pieces(sentencepiece, [hello, world, ing]) == ["Hello", " world", "ing", ""]
    # After a visible prompt the space belongs to the text, after a control token it does not.
    assert pieces(sentencepiece, [world], [hello]) == [" world", ""]
    assert pieces(sentencepiece, [hello], [0]) == ["Hello", ""]


def test_sentencepiece_bytes(sentencepiece: Tokenizer) -> None:
    assert pieces(sentencepiece, [3, *EURO, 5]) == ["Hello", "", "", "€", "ing", ""]
    assert sentencepiece.decode([3, *EURO, 5]) == "Hello€ing"
    assert "".join(pieces(sentencepiece, EURO[:2])) == REPLACEMENT
