"""Prompts as they are echoed, with a tokenizer that puts a token of its own first."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from cluster.openai.prompts import Prompt, echo_pieces
from cluster.tokenizer import Tokenizer
from tests.cluster.openai.fake_backend import FakeBackend, always
from tests.cluster.openai.harness import Front, make_service


@pytest.fixture(scope="module")
def llama() -> Tokenizer:
    """In Llama's manner: `<s>` first, U+2581 for spaces and one more in front of a text."""
    vocabulary = {"<s>": 0, "</s>": 1, "▁": 2, **{c: 3 + i for i, c in enumerate("Hi there")}}
    fast = FastTokenizer(models.BPE({t: i for i, t in enumerate(vocabulary)}, []))
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")
    )


def test_the_tokenizers_own_tokens_are_not_echoed(llama: Tokenizer) -> None:
    ids = tuple(llama.encode("Hi there", add_special_tokens=True))
    assert ids[0] == llama.bos_token_id
    pieces = echo_pieces(Prompt(ids, "Hi there"), llama)
    assert "".join(pieces) == "Hi there"
    assert len(pieces) == len(ids)
    # A client that sent them as ids sees them all.
    assert echo_pieces(Prompt(ids), llama)[0] == "<s>"


def test_output_after_such_a_prompt_keeps_its_first_space(llama: Tokenizer) -> None:
    output = llama.encode("i", add_special_tokens=False)
    assert llama.token_text(output[0]) == " "
    front = Front(make_service(llama, FakeBackend(always(output)), vocab_size=len(output) + 20))
    (echoed,) = front.complete(prompt="Hi", echo=True, max_tokens=2, ignore_eos=True)["choices"]
    assert echoed["text"] == "Hi i"
    (plain,) = front.complete(prompt="Hi", max_tokens=2, ignore_eos=True)["choices"]
    assert plain["text"] == " i"


def test_special_tokens_can_be_left_out(llama: Tokenizer) -> None:
    backend = FakeBackend(always([3]))
    front = Front(make_service(llama, backend))
    front.complete(prompt="Hi")
    front.complete(prompt="Hi", add_special_tokens=False)
    with_bos, without = (request.prompt_token_ids for request in backend.requests)
    assert with_bos == (0, *without)
    counts = [
        front.request("POST", "/tokenize", json={"prompt": "Hi", **extra}).json()["count"]
        for extra in ({}, {"add_special_tokens": False})
    ]
    assert counts == [len(with_bos), len(without)]
