"""The tokenizer's facts, and its refusal of what it does not understand."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.tokenizer import Tokenizer
from replicas.models.sources import resolve


def test_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.chat_template is not None
    assert not tokenizer.strips_first_space


def test_no_token_is_longer_than_said(tokenizer: Tokenizer) -> None:
    longest = max(len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size))
    assert longest <= tokenizer.max_token_chars <= 4 * longest


@pytest.mark.parametrize("text", ["", "Hi", "<|im_start|>user\nHi", "x y\n" * 200, "火の車 🌶️"])
def test_there_and_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert len(tokenizer.token_names(ids)) == len(ids)


def test_unused_ids_are_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_text(10**6) == ""
    assert tokenizer.token_names([10**6]) == [""]


def test_long_texts_leave_other_threads_running(tokenizer: Tokenizer) -> None:
    naps = 0
    encoded = threading.Event()

    def nap() -> None:
        nonlocal naps
        while not encoded.wait(0.001):
            naps += 1

    thread = threading.Thread(target=nap)
    thread.start()
    before = naps
    tokenizer.encode("qxzj" * 100_000, add_special_tokens=False)
    during = naps - before
    encoded.set()
    thread.join()
    # Were the GIL held, the other thread would have woken once at the most.
    assert during > 5


def test_loading_takes_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from cluster.tokenizer import Tokenizer; "
        "Tokenizer.load(Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(resolve("embedded"))], check=True)


def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    vocabulary = ["<|endoftext|>", "Ġ", *map(chr, range(33, 127)), *map(chr, range(161, 512))]
    (tmp_path / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(vocabulary)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    loaded = Tokenizer.load(tmp_path)
    assert loaded.vocab_size == len(vocabulary)
    assert loaded.decode(loaded.encode("Hi there", add_special_tokens=True)) == "Hi there"


def test_an_unknown_decoder_is_refused() -> None:
    fast = FastTokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]"))


def test_a_normaliser_may_fold_characters() -> None:
    fast = FastTokenizer(models.BPE({"a": 0, "é": 1}, []))
    fast.decoder = decoders.Fuse()
    plain = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))
    fast.normalizer = normalizers.NFC()
    folding = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))
    assert folding.max_token_chars > plain.max_token_chars == 1
    assert folding.encode("e\u0301" * 10, add_special_tokens=False) == [1] * 10
