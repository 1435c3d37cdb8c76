"""Requests with the blocks of their prompts: from a trace, or made up around a few hot prefixes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class Request:
    """One, as it arrives."""

    at: float
    """Seconds after the first."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Equal numbers stand for equal tokens since the prompt's beginning; the last block may be
    filled in part."""


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests, in the order of their arrival."""

    name: str
    requests: tuple[Request, ...]

    def faster(self, speed: float) -> Workload:
        """The same requests in 1/`speed` of the time."""
        faster = tuple(replace(each, at=each.at / speed) for each in self.requests)
        return Workload(f"{self.name} x{speed:g}", faster)

    def first(self, count: int) -> Workload:
        return Workload(self.name, self.requests[:count])

    @property
    def prompt_tokens(self) -> int:
        return sum(each.prompt_tokens for each in self.requests)

    @property
    def mean_output_tokens(self) -> float:
        return sum(each.output_tokens for each in self.requests) / len(self.requests)


def mooncake(path: Path, name: str, seed: int = 0) -> Workload:
    """A trace file in Mooncake's format: a JSON object a line, times in ms. Where several requests
    have the same time, as the trace's clock ticks every three seconds, they are spread at random
    up to the next.

    Raises:
        ValueError: a line that is none of those.
    """
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            requests.append(
                Request(
                    entry["timestamp"] / 1000,
                    entry["input_length"],
                    entry["output_length"],
                    tuple(entry["hash_ids"]),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from error
    return Workload(name, tuple(_spread(sorted(requests, key=lambda each: each.at), seed)))


def _spread(requests: list[Request], seed: int) -> Iterator[Request]:
    rng = random.Random(seed)
    moments = [
        (at, list(each)) for at, each in itertools.groupby(requests, lambda each: round(each.at))
    ]
    following = [at for at, _ in moments[1:]] + [moments[-1][0] + 1]
    for (at, together), until in zip(moments, following, strict=True):
        times = sorted(rng.uniform(at, until) for _ in together)
        for request, time in zip(together, times, strict=True):
            yield replace(request, at=time)


@dataclass(frozen=True, slots=True)
class Hot:
    """Poisson arrivals; each prompt is one of a few long prefixes, the popular ones drawn more
    often by Zipf's law, and a tail of its own."""

    requests_per_s: float = 20.0
    zipf: float = 1.2
    prefixes: int = 20
    prefix_tokens: int = 16_384
    mean_tail_tokens: int = 1024
    """Exponentially distributed, like the outputs."""
    mean_output_tokens: int = 350
    """As in the conversation trace."""
    requests: int = 10_000
    seed: int = 1

    def make(self) -> Workload:
        rng = random.Random(self.seed)
        weights = [rank**-self.zipf for rank in range(1, self.prefixes + 1)]
        length = self.prefix_tokens // BLOCK_TOKENS
        fresh = itertools.count(self.prefixes * length)
        requests, at = [], 0.0
        for _ in range(self.requests):
            at += rng.expovariate(self.requests_per_s)
            prefix = rng.choices(range(self.prefixes), weights)[0]
            tail = 1 + int(rng.expovariate(1 / self.mean_tail_tokens))
            output = 1 + int(rng.expovariate(1 / self.mean_output_tokens))
            own = [next(fresh) for _ in range(-(-tail // BLOCK_TOKENS))]
            blocks = (*range(prefix * length, (prefix + 1) * length), *own)
            requests.append(Request(at, self.prefix_tokens + tail, output, blocks))
        return Workload("hot", tuple(requests))
