"""Quire's own Placer in the simple model, fed as replicas feed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
from router.placement import Placer
from router.policies.cost import CostRule
from router.policies.prefix_aware import PrefixAware
from router.prompt_chains import block_kind
from tests.benchmarks.router_model.model import (
    PREFILL_TOKENS_PER_S,
    READ_TOKENS_PER_S,
    STEP_S,
    Replica,
    Setup,
)
from tests.benchmarks.router_model.workload import BLOCK_TOKENS, Request

FEED_PERIOD_S = 0.05
"""A replica says something after every step: these take 25 ms and more."""
RULE = CostRule(stalls=0.0)
"""In this model prefill delays no decode."""
_BLOCK_BYTES = BLOCK_TOKENS * 128 * 1024
_TIERS = ("stored", "removed", "offloaded", "dropped")


@dataclass(slots=True)
class _Feed:
    """Where one replica's has come."""

    replica: Replica
    sequence: int = 0


@dataclass
class Ours:
    """The real policy, index, bookings and states. What replicas say comes a
    little later, not at once; that they took a request in is seen as soon as in reality."""

    setup: Setup
    mean_output_tokens: float
    """What replicas expect of a choice."""
    placer: Placer = field(default_factory=lambda: Placer(PrefixAware(RULE)))
    _feeds: dict[str, _Feed] = field(default_factory=dict)
    _ticks: int = 0
    _calls: int = 0

    def __post_init__(self) -> None:
        self._engine = EngineInfo(
            device="model",
            dtype="bfloat16",
            kv_dtype="bfloat16",
            block_size=BLOCK_TOKENS,
            num_blocks=self.setup.device_blocks,
            max_model_len=2**20,
            vocab_size=1,
            block_bytes=_BLOCK_BYTES,
            host_blocks=self.setup.host_blocks,
            fingerprint="model",
        )

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        by_name = {replica.name: replica for replica in replicas}
        for replica in replicas:
            if replica.name not in self._feeds:
                self._connect(replica)
        self._calls += 1
        call, sampling = str(self._calls), SamplingParams(request.output_tokens, seed=0)
        asked = GenerateRequest(call, (0,) * request.prompt_tokens, sampling)
        chains = {block_kind(self._engine): [digest(block) for block in request.blocks]}
        now = replicas[0].now
        placement = self.placer.decide(call, asked, chains, list(by_name), now)
        chosen = by_name[placement.ranked[0]]
        self.placer.routed(call, chosen.name, now)
        return chosen

    def tick(self, now: float) -> None:
        """Every feed says what has changed."""
        for feed in self._feeds.values():
            feed.sequence += 1
            step = FeedStep(feed.sequence, _events(feed.replica), self._load(feed.replica))
            assert self.placer.states.apply(feed.replica.name, step, now)

    def replaced(self, old: Replica, new: Replica) -> None:
        del self._feeds[old.name]
        self.placer.forget(old.name)

    def _connect(self, replica: Replica) -> None:
        self._feeds[replica.name] = _Feed(replica)
        states, load = self.placer.states, self._load(replica)
        states.greet(FeedGreeting(replica.name, "1", "node", self._engine), replica.now)
        states.reset(replica.name, FeedSnapshot(0, (), (), load), replica.now)

    def _load(self, replica: Replica) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            running=replica.running,
            waiting=replica.waiting,
            queued_tokens=replica.queued_tokens,
            expected_tokens=int(replica.running * self.mean_output_tokens / 2),
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            read_bytes_per_s=READ_TOKENS_PER_S / BLOCK_TOKENS * _BLOCK_BYTES,
            written_bytes_per_s=READ_TOKENS_PER_S / BLOCK_TOKENS * _BLOCK_BYTES,
            decode_step_s=STEP_S * (1 + replica.running / 64),
        )


def digest(block: int) -> bytes:
    """Well spread, as real ones are."""
    return (block * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big") + block.to_bytes(
        8, "big", signed=True
    )


def _events(replica: Replica) -> BlockEvents:
    """The last thing that happened to a block in a tier counts."""
    device: dict[int, str] = {}
    host: dict[int, str] = {}
    for kind, block in replica.cache.changes:
        (device if kind in ("stored", "removed") else host)[block] = kind
    replica.cache.changes.clear()
    by_kind: dict[str, list[bytes]] = {kind: [] for kind in _TIERS}
    for block, kind in (*device.items(), *host.items()):
        by_kind[kind].append(digest(block))
    return BlockEvents(**{kind: tuple(digests) for kind, digests in by_kind.items()})
