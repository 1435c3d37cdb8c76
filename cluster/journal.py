"""One client request for one prompt: what came, what was shown, and what is still to come.

The journal outlives any replica: prompt and output token ids are kept apart and only grow, so
that another replica can take over from exactly what has been delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.openai.choice_text import ChoiceText
from cluster.openai.detokenizer import Detokenizer
from cluster.openai.logprobs import TokenEntry
from cluster.tokenizer import Tokenizer
from replicas.protocol import FinishReason, GenerateRequest, Receipt, TokenDelta, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How token ids become the text of a choice."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    """Whether a stop string, or a stop token's text, is part of the output."""
    echo: tuple[str, ...] | None = None
    """Text of each prompt token, where the prompt precedes each choice's output."""


@dataclass(slots=True)
class Update:
    """What a delta adds to one choice for the client to see."""

    choice: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    entries: Sequence[TokenEntry] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The token or the string that ended the choice, where one of the client's did."""
    abort: bool = False
    """The choice is complete and the engine does not know it yet."""

    @property
    def empty(self) -> bool:
        """Whether a client that sees no token ids would see nothing."""
        return not (self.text or self.entries or self.finish_reason)


class Choice:
    """State of one choice."""

    def __init__(self, index: int, text: ChoiceText, stop_token_ids: Sequence[int]) -> None:
        self.index = index
        self.output_token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.receipt: Receipt | None = None
        self.ended = False
        """Whether the engine has sent this choice's last delta."""
        self._text = text
        self._stop_token_ids = frozenset(stop_token_ids)

    def feed(self, delta: TokenDelta, *, include_stop: bool) -> Update:
        """Take in one delta; empty once the choice is finished."""
        self.ended = self.ended or delta.finish_reason is not None
        self.receipt = delta.receipt or self.receipt
        update = Update(self.index)
        if self.finish_reason is not None:
            return update
        known = len(self.output_token_ids)
        update.text = self._push(delta, None if include_stop else delta.stop_token_id)
        update.token_ids = tuple(self.output_token_ids[known:])
        if self._text.matched is not None:
            self.finish_reason = FinishReason.STOP
            update.stop_reason = self._text.matched
            update.abort = delta.finish_reason is None
        elif delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            if delta.stop_token_id in self._stop_token_ids:
                update.stop_reason = delta.stop_token_id
        update.finish_reason = self.finish_reason
        update.entries = self._text.take_entries(final=self.finish_reason is not None)
        return update

    def _push(self, delta: TokenDelta, silent: int | None) -> str:
        parts = []
        last = len(delta.token_ids) - 1
        for position, token_id in enumerate(delta.token_ids):
            self.output_token_ids.append(token_id)
            logprobs = delta.logprobs[position] if delta.logprobs else None
            hidden = position == last and token_id == silent
            parts.append(self._text.push(token_id, logprobs, silent=hidden))
            if self._text.matched is not None:
                # Tokens after a stop string belong to nobody.
                break
        if delta.finish_reason is not None:
            parts.append(self._text.flush())
        return "".join(parts)


class Journal:
    """All choices of one prompt."""

    def __init__(
        self, request: GenerateRequest, tokenizer: Tokenizer, options: TextOptions | None = None
    ) -> None:
        self.request = request
        self.options = options = options or TextOptions()
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        """One for each prompt token but the first, once they have come."""
        self._echo_text = "".join(options.echo or ())
        self._unopened = set(range(request.n))
        self._early: list[TokenDelta] = []
        self.choices = [
            Choice(index, self._choice_text(tokenizer), request.sampling.stop_token_ids)
            for index in range(request.n)
        ]

    def feed(self, delta: TokenDelta) -> list[Update]:
        """Updates that `delta` allows. Most often one; none while the prompt's logprobs, which
        come with choice 0, must be shown first."""
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self._early.append(delta)
        if self._awaits_prompt_logprobs:
            return []
        deltas, self._early = self._early, []
        return [self._update(each) for each in deltas]

    @property
    def finished(self) -> bool:
        """Whether every choice is complete for the client."""
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def settled(self) -> bool:
        """Whether nothing more is to be learnt: finished, and every receipt is in."""
        return self.finished and all(choice.ended for choice in self.choices)

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all choices so far."""
        return sum(len(choice.output_token_ids) for choice in self.choices)

    @property
    def _awaits_prompt_logprobs(self) -> bool:
        return (
            self.request.sampling.prompt_logprobs is not None
            and self.prompt_logprobs is None
            and not any(delta.choice == 0 for delta in self._early)
            and not self.choices[0].ended
        )

    def _update(self, delta: TokenDelta) -> Update:
        choice = self.choices[delta.choice]
        update = choice.feed(delta, include_stop=self.options.include_stop)
        if delta.choice in self._unopened:
            self._unopened.discard(delta.choice)
            update.text = self._echo_text + update.text
            update.entries = [*self._echo_entries(), *update.entries]
        return update

    def _echo_entries(self) -> list[TokenEntry]:
        if self.options.echo is None or self.prompt_logprobs is None:
            return []
        values = [None, *self.prompt_logprobs]
        entries = []
        offset = 0
        tokens = zip(self.request.prompt_token_ids, self.options.echo, values, strict=True)
        for token_id, text, logprobs in tokens:
            entries.append(TokenEntry(token_id, text, offset, logprobs))
            offset += len(text)
        return entries

    def _choice_text(self, tokenizer: Tokenizer) -> ChoiceText:
        detokenizer = Detokenizer(
            tokenizer, self.request.prompt_token_ids, shows_tail=self.options.echo is not None
        )
        return ChoiceText(
            detokenizer,
            self.options.stops,
            include_stop=self.options.include_stop,
            min_tokens=self.request.sampling.min_tokens,
            offset=len(self._echo_text),
        )
