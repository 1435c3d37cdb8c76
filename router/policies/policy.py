"""What a placement policy sees and decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

# Candidate and Terms are named tuples instead of dataclasses, as a decision among a thousand
# replicas makes a thousand of each, and a frozen dataclass takes four times as long to make.


class Candidate(NamedTuple):
    """A replica as the policy sees it for one request.

    Its figures come from the replica's feed with what this router sent there since; where that
    is stale (`fresh` is False), from this router's bookings alone.
    """

    replica: str
    fresh: bool = True
    queued_tokens: int = 0
    """Tokens to be prefilled there before this request's."""
    running: int = 0
    """Choices that decode, or soon will."""
    in_flight: int = 0
    """Choices there, waiting ones included."""
    device_tokens: int = 0
    """Of the request's prompt, on the device."""
    host_tokens: int = 0
    """Following those, in host memory within reach."""
    uncached_tokens: int = 0
    """Of this request, to be computed: at least one."""
    filled_tokens: int = 0
    """KV that everybody there is going to take at once, this request included, as expected."""
    kv_tokens: int = 0
    """KV there is; 0 where that is not known."""
    prefill_tokens_per_s: float = 500.0
    read_tokens_per_s: float = 1e6
    """Host to device."""
    written_tokens_per_s: float = 0.0
    """Device to host; 0 without a host tier."""
    decode_step_s: float = 0.0
    decode_choice_s: float = 0.0
    """What one more choice adds to a decoding step."""
    preemptions_per_s: float = 0.0


class Demand(NamedTuple):
    """The request."""

    tokens: int
    """To have in the KV before the first output."""
    output_tokens: float
    """Expected, of all choices."""
    hits_per_minute: float
    """Of the deepest block that anybody holds."""
    key: bytes
    """What breaks ties: equal prompts break them equally."""


class Terms(NamedTuple):
    """A candidate's cost, all in seconds."""

    replica: str
    wait_s: float
    """Until its prefill begins."""
    work_s: float
    """Of its own: computing what is not cached, reading what the host has."""
    later_s: float
    """What that work costs the requests that come later."""
    decode_s: float
    """By which it slows decoding choices and they slow it."""
    preempt_s: float
    """The expected cost of preemptions."""
    cost_s: float
    """The sum."""
    device_tokens: int
    host_tokens: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """All candidates, the best first."""

    ranked: tuple[str, ...]
    reason: str
    terms: tuple[Terms, ...] = ()
    """One a candidate, as given; none where the policy counts no costs."""


class PlacementPolicy(Protocol):
    """Orders replicas for one request."""

    @property
    def name(self) -> str:
        """As configured."""
        ...

    @property
    def knows_load(self) -> bool:
        """Whether it goes by the replicas' state."""
        ...

    @property
    def knows_prefixes(self) -> bool:
        """Whether it is worth finding out who holds the prompt's blocks."""
        ...

    def rank(self, demand: Demand, candidates: Sequence[Candidate]) -> Ranking:
        """Never called without candidates."""
        ...
