"""Text to token ids and back, for one model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.openai.token_bytes import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NORMALIZER_SLACK = 4
"""A normaliser may fold several characters into one before the vocabulary is looked up."""
_INLINE_CHARS = 256


class ChatTemplateError(Exception):
    """The chat template does not take these messages."""


class Tokenizer:
    """A fast tokenizer, thread-safe and without state between calls.

    Long texts are encoded with the GIL released, so that other threads go on meanwhile.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ValueError where the tokenizer is not a fast one, or of an unknown family."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer")
        self._tokenizer = tokenizer
        self._backend = backend
        self._bytes = TokenBytes(backend)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        """One more than the highest token id; ids between may be unused."""
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        """Control tokens, which never show in an output text."""
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.bos_token_id: int | None = tokenizer.bos_token_id
        slack = 1 if backend.normalizer is None else _NORMALIZER_SLACK
        self.max_token_chars = max(map(len, vocabulary)) * slack
        """No token stands for more characters of a text than this."""
        template = tokenizer.chat_template
        self.chat_template = template if isinstance(template, str) else None
        """Source of the Jinja template; None where the model has none."""

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """The tokenizer in a model's folder. Raises OSError or ValueError where there is none."""
        if (path / "tokenizer.json").exists():
            # Complete in itself, and loaded so without importing torch.
            from transformers import PreTrainedTokenizerFast

            return cls(PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True))
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(str(path), local_files_only=True))

    @property
    def strips_first_space(self) -> bool:
        """Whether the first space of a text is the tokenizer's own and not shown."""
        return self._bytes.strips_first_space

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        if len(text) <= _INLINE_CHARS:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            # `encode` holds the GIL all through; the batch call lets go of it.
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, control tokens included."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token stands for."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One token by itself, U+FFFD for what is no whole character."""
        return self._bytes[token_id].decode("utf-8", "replace")

    def token_names(self, token_ids: Iterable[int]) -> list[str]:
        """Tokens as the vocabulary spells them; empty for unused ids."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The prompt text that the model's template makes of `messages`.

        Raises ChatTemplateError where the model has no template or it refuses the messages.
        """
        from jinja2 import TemplateError

        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ChatTemplateError(str(error)) from error
        return str(text)
