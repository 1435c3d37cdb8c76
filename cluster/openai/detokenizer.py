"""Output text, one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 4
"""A UTF-8 character has at most four bytes, so an unfinished one began within four tokens."""


class TokenText(Protocol):
    """What detokenising needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def strips_first_space(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """Turns the tokens of one choice into text, piece by piece.

    All pieces and the flush, joined, are the text of all tokens; no piece ends inside a
    character. The prompt is context only: where it ends inside a character, the output's first
    piece is that character if the output completes it. `shows_tail` says that the prompt's
    text precedes the output (echo): then the unfinished part shows even if it is not completed.
    """

    def __init__(
        self,
        tokenizer: TokenText,
        prompt: Sequence[int] = (),
        *,
        shows_tail: bool = False,
        skips_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skips_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in prompt[-_CONTEXT_TOKENS:]:
            self._decoder.decode(tokenizer.token_bytes(token_id))
        self._ghost = self.pending and not shows_tail
        self._strip = tokenizer.strips_first_space and self._skipped.issuperset(prompt)

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished character are held back."""
        return bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes; empty for a control token."""
        if token_id in self._skipped:
            return ""
        return self._shown(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """U+FFFD for a character that will never be finished, else nothing."""
        return self._shown(self._decoder.decode(b"", True))

    def _shown(self, text: str) -> str:
        if not text:
            return text
        if self._ghost:
            # The prompt's last character stays unfinished, and it is not ours to show.
            self._ghost = False
            text = text.removeprefix(REPLACEMENT)
        if self._strip:
            self._strip = False
            text = text.removeprefix(" ")
        return text
