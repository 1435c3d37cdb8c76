"""What a placement decision takes, by the number of replicas, over a large index."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replicas.core.block_hash import DIGEST_BYTES, BlockHasher
from replicas.core.sampling_params import SamplingParams
from replicas.protocol import (
    BlockEvents,
    EngineInfo,
    FeedGreeting,
    FeedSnapshot,
    FeedStep,
    GenerateRequest,
    ReplicaSnapshot,
)
from router.placement import POLICIES, Placer
from router.prompt_chains import block_kind

BLOCK_TOKENS = 64
PROMPT_TOKENS = 32_768
_SHARED = 64
"""Leading blocks of a prompt that every fourth replica holds, like a system prompt."""
_OWN = 320
"""Blocks after those that one replica holds, like a conversation."""
_PERIOD_S = 0.01
"""Between two requests."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of it."""

    blocks: int
    """Listed by the index."""
    replicas: tuple[int, ...]
    decisions: int


STANDARD = Scale(10_000_000, (8, 64, 1000), 3000)
QUICK = Scale(100_000, (8, 64), 200)


@dataclass(frozen=True, slots=True)
class Times:
    """With one number of replicas."""

    replicas: int
    blocks: int
    p50_ms: float
    p99_ms: float
    p99_cpu_ms: float
    """The same in CPU time: what is left of it when other processes hold the core."""
    hash_ms: float
    """Hashing the prompt, which comes on top."""
    mib_a_million: float
    """Memory of a million blocks."""
    event_us: float
    """Taking in that a block was stored, and another one removed, each."""
    drop_ms: float
    """Forgetting a replica."""


@dataclass(frozen=True, slots=True)
class AllTimes:
    """One a number of replicas."""

    rows: tuple[Times, ...]

    def render(self, *, judge: bool) -> str:
        """Markdown."""
        columns = (
            *("replicas", "blocks", "p50 ms", "p99 ms", "p99 CPU ms", "hashing ms"),
            *("MiB a million", "us a block event", "ms to drop a replica"),
        )
        lines = [
            f"### A decision: {PROMPT_TOKENS} tokens in blocks of {BLOCK_TOKENS}",
            "",
            f"| {' | '.join(columns)} |",
            "|---" * len(columns) + "|",
        ]
        for row in self.rows:
            cells = (
                *(str(row.replicas), str(row.blocks), f"{row.p50_ms:.3f}", f"{row.p99_ms:.3f}"),
                *(f"{row.p99_cpu_ms:.3f}", f"{row.hash_ms:.2f}", f"{row.mib_a_million:.0f}"),
                *(f"{row.event_us:.2f}", f"{row.drop_ms:.2f}"),
            )
            lines.append(f"| {' | '.join(cells)} |")
        verdicts = [
            f"- p99 at 64 replicas: {row.p99_ms:.3f} ms, target < 1 ms: "
            + ("met" if row.p99_ms < 1 else "MISSED")
            for row in self.rows
            if judge and row.replicas == 64
        ]
        return "\n".join([*lines, "", *verdicts])

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]


class Decisions:
    """Measures, each number of replicas in a process of its own."""

    def __init__(self, scale: Scale, say: Callable[[str], None]) -> None:
        self._scale = scale
        self._say = say

    def run(self) -> AllTimes:
        rows = []
        for replicas in self._scale.replicas:
            self._say(f"decisions: {replicas} replicas, {self._scale.blocks} blocks")
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, context) as pool:
                rows.append(pool.submit(measure, self._scale, replicas).result())
        return AllTimes(tuple(rows))


def measure(scale: Scale, replicas: int) -> Times:
    """In this process, which should be a new one."""
    before = _resident_bytes()
    cluster = _Cluster(scale.blocks, replicas)
    blocks = len(cluster.placer.states.index)
    mib = (_resident_bytes() - before) / 2**20 / (blocks / 1e6)
    decisions, cpu, event_s = cluster.decide(scale.decisions)
    begin = time.perf_counter()
    cluster.placer.forget("r0")
    drop_s = time.perf_counter() - begin
    return Times(
        replicas=replicas,
        blocks=blocks,
        p50_ms=1e3 * _at(decisions, 0.5),
        p99_ms=1e3 * _at(decisions, 0.99),
        p99_cpu_ms=1e3 * _at(cpu, 0.99),
        hash_ms=1e3 * _hash_s(),
        mib_a_million=mib,
        event_us=1e6 * event_s,
        drop_ms=1e3 * drop_s,
    )


class _Cluster:
    """A Placer whose index is full, and replicas that hold what it lists."""

    def __init__(self, blocks: int, replicas: int) -> None:
        self.placer = Placer(POLICIES["prefix_aware"]())
        self._engine = EngineInfo(
            device="none",
            dtype="bfloat16",
            kv_dtype="bfloat16",
            block_size=BLOCK_TOKENS,
            num_blocks=2 * blocks // replicas,
            max_model_len=2**20,
            vocab_size=1,
            block_bytes=2**23,
            fingerprint="none",
        )
        self._names = [f"r{number}" for number in range(replicas)]
        self._rng = random.Random(0)
        self._shared = [_digests(_SHARED) for _ in range(8)]
        # Tuples, here and below: the garbage collector would look through lists, time and again.
        self._own = {name: tuple(_digests(blocks // replicas)) for name in self._names}
        self._sequences = dict.fromkeys(self._names, 0)
        for number, name in enumerate(self._names):
            held = [*self._own[name], *itertools.chain(*self._shared[number % 4 :: 4])]
            greeting = FeedGreeting(name, "1", f"node {number // 8}", self._engine)
            self.placer.states.greet(greeting, 0.0)
            snapshot = FeedSnapshot(0, tuple(held), (), self._load())
            self.placer.states.reset(name, snapshot, 0.0)
        # The index has them now; a sample is enough to ask for.
        self._own = {name: own[: 4 * _OWN] for name, own in self._own.items()}

    def decide(self, count: int) -> tuple[list[float], list[float], float]:
        """Seconds of each decision, by the clock and of the CPU; mean seconds of a block event."""
        asked = GenerateRequest("id", (0,) * PROMPT_TOKENS, SamplingParams(1000, seed=0))
        kind = block_kind(self._engine)
        placed: deque[tuple[str, str, tuple[bytes, ...]]] = deque()
        took, cpu, event_s, events = [], [], 0.0, 0
        for number in range(count):
            now, call, chain = number * _PERIOD_S, str(number), self._chain()
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            placement = self.placer.decide(call, asked, {kind: chain}, self._names, now)
            cpu.append(time.thread_time() - begin_cpu)
            took.append(time.perf_counter() - begin)
            self.placer.routed(call, placement.ranked[0], now)
            placed.append((call, placement.ranked[0], chain))
            if len(placed) > 2 * len(self._names):
                old, name, chain = placed.popleft()
                begin = time.perf_counter()
                events += self._store(name, chain, now)
                event_s += time.perf_counter() - begin
                self.placer.completed(old)
            for name in self._names[number % 100 :: 100]:
                self._step(name, BlockEvents(), now)
        return took, cpu, event_s / events if events else 0.0

    def _chain(self) -> tuple[bytes, ...]:
        """Shared by many, then known to one, then new to all."""
        rng = self._rng
        number = rng.randrange(len(self._names))
        own, shared = self._own[self._names[number]], self._shared[number % 4 :: 4]
        start = rng.randrange(0, max(1, len(own) - _OWN))
        known = [*rng.choice(shared), *own[start : start + _OWN]]
        return (*known, *_digests(PROMPT_TOKENS // BLOCK_TOKENS - len(known)))

    def _store(self, name: str, chain: tuple[bytes, ...], now: float) -> int:
        """The replica has computed the chain, and evicts as many of other blocks."""
        new = chain[_SHARED + _OWN :]
        self._step(name, BlockEvents(stored=tuple(new)), now)
        self._step(name, BlockEvents(removed=tuple(new)), now)
        return 2 * len(new)

    def _step(self, name: str, events: BlockEvents, now: float) -> None:
        self._sequences[name] += 1
        step = FeedStep(self._sequences[name], events, self._load())
        assert self.placer.states.apply(name, step, now)

    def _load(self) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            running=self._rng.randrange(10, 60),
            queued_tokens=self._rng.randrange(0, 30_000),
            expected_tokens=5000,
            prefill_tokens_per_s=self._rng.uniform(9000, 11_000),
            decode_step_s=0.03,
        )


def _at(times: list[float], share: float) -> float:
    return sorted(times)[int(share * len(times))]


def _digests(count: int) -> list[bytes]:
    drawn = os.urandom(DIGEST_BYTES * count)
    return [drawn[at : at + DIGEST_BYTES] for at in range(0, len(drawn), DIGEST_BYTES)]


def _hash_s() -> float:
    """The least of some, as hashing does the same every time."""
    hasher = BlockHasher(fingerprint="none", kv_dtype="bfloat16", block_size=BLOCK_TOKENS)
    prompt, took = list(range(PROMPT_TOKENS)), []
    for _ in range(20):
        begin = time.perf_counter()
        hasher.chain(prompt)
        took.append(time.perf_counter() - begin)
    return min(took)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
