"""The bytes that each token stands for.

Text is bytes first: a token may be half a character. With every token's bytes known, text
can be rebuilt one token at a time, exactly and at a constant cost a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

SENTENCEPIECE_SPACE = "▁"
_PROBE = "Quire: naïve  café,\n\t1234 — 火の車 🌶️ ok"


class TokenBytes:
    """Bytes of a fast tokenizer's tokens, worked out from its decoder and kept."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        """Raises ValueError for a tokenizer whose decoder is of no known family."""
        self._tokenizer = tokenizer
        steps = list(_decoder_steps(tokenizer))
        self._byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self._byte_fallback = any(step["type"] == "ByteFallback" for step in steps)
        self.strips_first_space = any(_strips_first_space(step) for step in steps)
        """Whether a decoded text loses one leading space."""
        self._known: dict[int, bytes] = {}
        ids = tokenizer.encode(_PROBE, add_special_tokens=False).ids
        joined = b"".join(self[i] for i in ids).decode("utf-8", "replace")
        if self.strips_first_space:
            joined = joined.removeprefix(" ")
        if joined != tokenizer.decode(ids, skip_special_tokens=False):
            kinds = ", ".join(step["type"] for step in steps) or "none"
            raise ValueError(f"cannot tell the bytes of this tokenizer's tokens (decoder: {kinds})")

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token; none for an id that the tokenizer does not know."""
        known = self._known.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            known = self._known[token_id] = b"" if token is None else self._convert(token)
        return known

    def _convert(self, token: str) -> bytes:
        if self._byte_level:
            values = [_BYTE_OF.get(character) for character in token]
            if None in values:
                # An added token is stored as plain text, and only some are all in the alphabet.
                return token.encode()
            return bytes(value for value in values if value is not None)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        return token.replace(SENTENCEPIECE_SPACE, " ").encode()


def _decoder_steps(tokenizer: FastTokenizer) -> Iterator[dict[str, Any]]:
    if tokenizer.decoder is None:
        return
    decoder = json.loads(tokenizer.decoder.__getstate__())
    yield from decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _strips_first_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step["prepend_scheme"] != "never")
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"] == 1)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where it is
    printable in Latin-1, else the next free one from U+0100 on."""
    alphabet: dict[str, int] = {}
    unprintable = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(256 + unprintable)] = byte
            unprintable += 1
    return alphabet


_BYTE_OF = _byte_alphabet()
