"""Server-sent events of a streamed request.

A chunk is one line of JSON whose unchanging parts are made once; all characters beyond ASCII
are escaped, since some clients take U+2028 and its like for the end of a line.
"""

from __future__ import annotations

import json
from typing import Any

from cluster.journal import Update
from cluster.openai.errors import ApiError
from cluster.openai.generation import Generation
from cluster.openai.responses import prompt_extras, shaped_logprobs
from cluster.openai.usage import token_counts, usage
from cluster.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"

encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class ChunkWriter:
    """Writes the updates of one request as events."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._opened: set[int] = set()
        envelope = {
            "id": generation.id,
            "object": "chat.completion.chunk" if generation.chat else "text_completion",
            "created": generation.created,
            "model": generation.model,
        }
        self._head = "data: " + encode(envelope)[:-1]

    def write(self, index: int, update: Update) -> str:
        """Events for one update of the choice `index`; none where it has nothing to show."""
        ids = self._generation.return_token_ids and update.token_ids
        if update.empty and not ids:
            return ""
        opening = index not in self._opened
        self._opened.add(index)
        prompt = self._prompt(index) if opening else {}
        shown = {"token_ids": update.token_ids} if ids else {}
        if self._generation.chat:
            role = self._role(index, prompt) if opening else ""
            return role + self._chat(index, update, shown)
        text = f'"text":{encode(update.text)},"logprobs":{self._logprobs(update)}'
        return self._event(index, text + _end(update) + _more(prompt | shown))

    def usage(self) -> str:
        """The event before the last: the usage of the whole request, and no choices."""
        total = encode(usage(self._generation.journals))
        return f'{self._head},"choices":[],"usage":{total}}}\n\n'

    def _role(self, index: int, prompt: dict[str, Any]) -> str:
        delta = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return self._event(index, delta, _more(prompt))

    def _chat(self, index: int, update: Update, shown: dict[str, Any]) -> str:
        events = ""
        if update.text or update.entries or shown:
            delta = f'"delta":{{"content":{encode(update.text)}}}'
            logprobs = self._logprobs(update)
            content = f'{delta},"logprobs":{logprobs},"finish_reason":null{_more(shown)}'
            events += self._event(index, content)
        if update.finish_reason is not None:
            events += self._event(index, '"delta":{},"logprobs":null' + _end(update))
        return events

    def _event(self, index: int, choice: str, extras: str = "") -> str:
        return (
            f'{self._head},"choices":[{{"index":{index},{choice}}}]{extras}{self._counts()}}}\n\n'
        )

    def _counts(self) -> str:
        if self._generation.continuous_usage:
            return ',"usage":' + encode(token_counts(self._generation.journals))
        return ',"usage":null' if self._generation.include_usage else ""

    def _logprobs(self, update: Update) -> str:
        return encode(shaped_logprobs(self._generation, update.entries, self._tokenizer))

    def _prompt(self, index: int) -> dict[str, Any]:
        journal = self._generation.journals[index // self._generation.n]
        return prompt_extras(self._generation, journal, self._tokenizer)


def error_event(error: ApiError) -> str:
    """An error after the response has begun."""
    return f"data: {encode(error.body())}\n\n"


def _end(update: Update) -> str:
    if update.finish_reason is None:
        return ',"finish_reason":null'
    reason = encode(update.finish_reason)
    return f',"finish_reason":{reason},"stop_reason":{encode(update.stop_reason)}'


def _more(fields: dict[str, Any]) -> str:
    """Fields to follow others in an object."""
    return "," + encode(fields)[1:-1] if fields else ""
