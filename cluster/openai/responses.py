"""Whole responses: all updates of a request put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.journal import Journal, Update
from cluster.openai.generation import Generation
from cluster.openai.logprobs import TokenEntry, chat_logprobs, legacy_logprobs, prompt_logprobs
from cluster.openai.usage import usage
from cluster.tokenizer import Tokenizer


class Collected:
    """Everything that one choice has to show."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.entries: list[TokenEntry] = []
        self.token_ids: list[int] = []
        self.last = Update(0)

    def add(self, update: Update) -> None:
        """Take in the next update of this choice."""
        self.parts.append(update.text)
        self.entries.extend(update.entries)
        self.token_ids.extend(update.token_ids)
        if update.finish_reason is not None:
            self.last = update


def full_response(
    generation: Generation, collected: list[Collected], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The body of a request that is not streamed; `collected` by choice index."""
    choices = [_choice(index, each, generation, tokenizer) for index, each in enumerate(collected)]
    response = {
        "id": generation.id,
        "object": "chat.completion" if generation.chat else "text_completion",
        "created": generation.created,
        "model": generation.model,
        "choices": choices,
        "usage": usage(generation.journals),
    }
    if generation.chat:
        response |= prompt_extras(generation, generation.journals[0], tokenizer)
    return response


def shaped_logprobs(
    generation: Generation, entries: Sequence[TokenEntry], tokenizer: Tokenizer
) -> dict[str, Any] | None:
    """Entries in this endpoint's shape; None where no logprobs were asked for."""
    if generation.logprobs is None:
        return None
    shape = chat_logprobs if generation.chat else legacy_logprobs
    return shape(entries, tokenizer, generation.logprobs)


def prompt_extras(generation: Generation, journal: Journal, tokenizer: Tokenizer) -> dict[str, Any]:
    """What clients may ask about the prompt: `prompt_logprobs` and `prompt_token_ids`."""
    extras: dict[str, Any] = {}
    token_ids = journal.request.prompt_token_ids
    if generation.prompt_logprobs is not None and journal.prompt_logprobs is not None:
        extras["prompt_logprobs"] = prompt_logprobs(
            token_ids, journal.prompt_logprobs, tokenizer, generation.prompt_logprobs
        )
    if generation.return_token_ids:
        extras["prompt_token_ids"] = list(token_ids)
    return extras


def _choice(
    index: int, collected: Collected, generation: Generation, tokenizer: Tokenizer
) -> dict[str, Any]:
    text = "".join(collected.parts)
    body: dict[str, Any] = {"index": index}
    if generation.chat:
        body["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        body["text"] = text
    body["logprobs"] = shaped_logprobs(generation, collected.entries, tokenizer)
    body["finish_reason"] = collected.last.finish_reason
    body["stop_reason"] = collected.last.stop_reason
    if generation.return_token_ids:
        body["token_ids"] = collected.token_ids
    if not generation.chat:
        journal = generation.journals[index // generation.n]
        body |= prompt_extras(generation, journal, tokenizer)
    return body
