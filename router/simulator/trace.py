"""A trace: who asked when, for how many tokens, and which prompt blocks were equal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path


class TraceError(ValueError):
    """A trace cannot be read; the message names the file, the line and what is allowed."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}" if line else f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrived_s: float
    """Seconds since the trace began."""
    num_prompt_tokens: int
    num_output_tokens: int
    """At least 1: who asked has waited for a token."""
    blocks: tuple[int, ...]
    """An id for each block of the prompt, the last one perhaps not full. Equal ids stand for
    equal tokens after an equal prefix."""

    def prompt_token_ids(self, block_size: int) -> tuple[int, ...]:
        """Stand-ins for the tokens nobody recorded: each block repeats its id."""
        token_ids: list[int] = []
        for block in self.blocks:
            token_ids += [block] * block_size
        return tuple(token_ids[: self.num_prompt_tokens])


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    requests: tuple[TraceRequest, ...]
    block_size: int
    """Tokens that a block id stands for."""

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        if not self.requests:
            return 0.0
        return self.requests[-1].arrived_s - self.requests[0].arrived_s

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)

    def first(self, count: int) -> Trace:
        """The first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def faster(self, speed: float) -> Trace:
        """The same requests, arriving `speed` times as fast."""
        sped = (replace(each, arrived_s=each.arrived_s / speed) for each in self.requests)
        return replace(self, requests=tuple(sped))


class BlockIds:
    """Numbers what is named in a trace by first appearance, so that ids fit a token."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._next = 0

    def named(self, name: int) -> int:
        """The id of the block with this name."""
        known = self._ids.get(name)
        if known is None:
            known = self._ids[name] = self.fresh()
        return known

    def fresh(self) -> int:
        """An id that nothing else has."""
        self._next += 1
        return self._next - 1
