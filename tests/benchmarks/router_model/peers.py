"""Placement policies of other projects, written anew from their published rules.

They exist in the benchmark only, see the model's true state at the moment of placing, and book
nothing: at their best, that is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from tests.benchmarks.router_model.cache import Lru
from tests.benchmarks.router_model.model import PREFILL_TOKENS_PER_S, STEP_S, Replica, Setup
from tests.benchmarks.router_model.workload import BLOCK_TOKENS, Request


class Policy(Protocol):
    """Chooses one of the replicas, which are at the moment of the request's arrival."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica: ...

    def replaced(self, old: Replica, new: Replica) -> None:
        """`new` has taken the place of `old`."""
        ...


class Stateless:
    """Nothing to forget."""

    def replaced(self, old: Replica, new: Replica) -> None:
        """See Policy."""


class RoundRobin(Stateless):
    """Every replica in turn."""

    def __init__(self) -> None:
        self._count = 0

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        self._count += 1
        return replicas[self._count % len(replicas)]


class PowerOfTwo(Stateless):
    """Ray Serve's default: of two drawn at random the one with fewer requests."""

    def __init__(self) -> None:
        self._rng = random.Random(1)

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        return min(self._rng.sample(replicas, 2), key=lambda replica: replica.in_flight)


class Trees:
    """What a router with approximate prefix trees remembers: what it sent where. `max_blocks` of
    None: for ever."""

    def __init__(self, max_blocks: int | None) -> None:
        self._max_blocks = max_blocks
        self._trees: dict[str, Lru] = {}

    def of(self, replica: Replica) -> Lru:
        most = 10**9 if self._max_blocks is None else self._max_blocks
        return self._trees.setdefault(replica.name, Lru(most))

    def share(self, request: Request, replica: Replica) -> float:
        """Of the prompt, that matches."""
        blocks = request.blocks
        return self.of(replica).leading(blocks) / len(blocks) if blocks else 0.0

    def smallest(self, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=lambda replica: len(self.of(replica)))

    def forget(self, replica: Replica) -> None:
        self._trees.pop(replica.name, None)


class SglangCacheAware:
    """Queues differ by more than 64 and 1.5 times: the shortest. Else the longest match, if more
    than 0.3 of the prompt; else the smallest tree."""

    def __init__(self) -> None:
        self._trees = Trees(max_blocks=2**24 // BLOCK_TOKENS)

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        chosen = self._choose(request, replicas)
        self._trees.of(chosen).touch(request.blocks)
        return chosen

    def replaced(self, old: Replica, new: Replica) -> None:
        self._trees.forget(old)

    def _choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        shortest = min(replicas, key=lambda replica: replica.in_flight)
        longest = max(replica.in_flight for replica in replicas)
        if longest - shortest.in_flight > 64 and longest > 1.5 * shortest.in_flight:
            return shortest
        best = max(replicas, key=lambda replica: self._trees.share(request, replica))
        if self._trees.share(request, best) > 0.3:
            return best
        return self._trees.smallest(replicas)


class RayPrefixAffinity:
    """A match of more than 0.1 of the prompt: power of two among the longest. Else the smallest
    tree. By default trees are never evicted from, and no imbalance ever breaks the affinity."""

    def __init__(self) -> None:
        self._trees = Trees(max_blocks=None)
        self._rng = random.Random(1)

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        shares = {replica.name: self._trees.share(request, replica) for replica in replicas}
        longest = max(shares.values())
        if longest >= 0.1:
            holders = [replica for replica in replicas if shares[replica.name] == longest]
            pair = self._rng.sample(holders, min(2, len(holders)))
            chosen = min(pair, key=lambda replica: replica.in_flight)
        else:
            chosen = self._trees.smallest(replicas)
        self._trees.of(chosen).touch(request.blocks)
        return chosen

    def replaced(self, old: Replica, new: Replica) -> None:
        self._trees.forget(old)


class DynamoPredicted(Stateless):
    """Least blocks to prefill, queued ones included, plus blocks of active requests."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        def cost(replica: Replica) -> float:
            prefill = replica.queued_tokens + replica.uncached_tokens(request)
            return prefill / BLOCK_TOKENS + replica.active_blocks(request)

        return min(replicas, key=cost)


class LlmD(Stateless):
    """3 x matched share + 2 x shortness of the queue + 2 x free share of the KV."""

    def __init__(self, setup: Setup) -> None:
        self._kv_blocks = setup.device_blocks

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        shortest = min(replica.waiting for replica in replicas)
        spread = max(replica.waiting for replica in replicas) - shortest

        def score(replica: Replica) -> float:
            matched = 1 - replica.uncached_tokens(request) / request.prompt_tokens
            queue = 1 - (replica.waiting - shortest) / spread if spread else 1.0
            free = 1 - min(1.0, replica.active_blocks() / self._kv_blocks)
            return 3 * matched + 2 * queue + 2 * free

        return max(replicas, key=score)


class LMetric(Stateless):
    """Least product of the tokens to prefill and the batch."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        def cost(replica: Replica) -> float:
            prefill = replica.queued_tokens + replica.uncached_tokens(request)
            return prefill * (replica.in_flight + 1)

        return min(replicas, key=cost)


class PrebleE2(Stateless):
    """Exploit: most of the prompt is cached somewhere, so go there, or to the least loaded of
    several. Explore: the least load, which is queued prefill and what decoding is slowed by."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        def load(replica: Replica) -> float:
            slower_s = request.output_tokens * STEP_S * replica.running / 64
            return replica.queued_tokens / PREFILL_TOKENS_PER_S + slower_s

        uncached = {replica.name: replica.uncached_tokens(request) for replica in replicas}
        least = min(uncached.values())
        if request.prompt_tokens - least > least:
            return min((r for r in replicas if uncached[r.name] == least), key=load)
        return min(replicas, key=load)


def peers(setup: Setup) -> dict[str, Callable[[], Policy]]:
    """By the name in the table."""
    return {
        "round robin": RoundRobin,
        "power of two": PowerOfTwo,
        "SGLang smallest-tree": SglangCacheAware,
        "Ray PrefixAffinity": RayPrefixAffinity,
        "Dynamo + predict": DynamoPredicted,
        "llm-d 3:2:2": lambda: LlmD(setup),
        "LMetric": LMetric,
        "Preble E2": PrebleE2,
    }
