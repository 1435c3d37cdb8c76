"""Log-probabilities in the two shapes that OpenAI's endpoints give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from replicas.protocol import TokenLogprobs


class TokenNames(Protocol):
    """What naming tokens needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...


@dataclass(slots=True)
class TokenEntry:
    """One token of a text."""

    token_id: int
    text: str
    """What the token adds to the text: nothing for one that leaves a character unfinished,
    all of it for the one that completes it. Joined, the entries' texts are the text."""
    offset: int
    """Characters of the text before it."""
    logprobs: TokenLogprobs | None
    """None for the first token of a prompt, which nothing predicts."""


def legacy_logprobs(
    entries: Sequence[TokenEntry], tokenizer: TokenNames, top: int
) -> dict[str, list[Any]]:
    """Parallel arrays for /v1/completions, `top` alternatives a token."""
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [entry.logprobs and entry.logprobs.logprob for entry in entries],
        "top_logprobs": [_legacy_top(entry, tokenizer, top) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(
    entries: Sequence[TokenEntry], tokenizer: TokenNames, top: int
) -> dict[str, list[dict[str, Any]]]:
    """A list of tokens for chat, `top` alternatives each."""
    content = []
    for entry in entries:
        if entry.logprobs is not None:
            item = _chat_token(entry.token_id, entry.logprobs.logprob, tokenizer)
            alternatives = entry.logprobs.top[:top]
            item["top_logprobs"] = [_chat_token(i, value, tokenizer) for i, value in alternatives]
            content.append(item)
    return {"content": content}


def prompt_logprobs(
    token_ids: Sequence[int], values: Sequence[TokenLogprobs], tokenizer: TokenNames, top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """One object a prompt token (None for the first), keyed by token id: the token itself and
    its `top` likeliest rivals with logprob, rank and text."""
    rows: list[dict[str, dict[str, Any]] | None] = [None]
    for token_id, value in zip(token_ids[1:], values, strict=True):
        ranked = [(i, logprob, rank) for rank, (i, logprob) in enumerate(value.top[:top], 1)]
        row = {
            str(i): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": tokenizer.token_text(i),
            }
            for i, logprob, rank in [(token_id, value.logprob, value.rank), *ranked]
        }
        rows.append(row)
    return rows


def _legacy_top(entry: TokenEntry, tokenizer: TokenNames, top: int) -> dict[str, float] | None:
    if entry.logprobs is None:
        return None
    row = {entry.text: entry.logprobs.logprob}
    for token_id, logprob in entry.logprobs.top[:top]:
        if token_id != entry.token_id:
            row.setdefault(_legacy_name(tokenizer.token_bytes(token_id)), logprob)
    return row


def _legacy_name(data: bytes) -> str:
    # As OpenAI writes tokens that are no text: distinct for distinct tokens, unlike U+FFFD.
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_token(token_id: int, logprob: float, tokenizer: TokenNames) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
