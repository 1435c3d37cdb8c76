"""Feeds as replicas would send them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from replicas.protocol import (
    BlockEvents,
    EngineInfo,
    FeedGreeting,
    FeedSnapshot,
    FeedStep,
    ReplicaSnapshot,
)
from router.replica_states import ReplicaStates

BLOCK_SIZE = 16
ENGINE = EngineInfo(
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    block_size=BLOCK_SIZE,
    num_blocks=4096,
    max_model_len=65_536,
    vocab_size=100_000,
    block_bytes=1000,
    host_blocks=4096,
    fingerprint="model",
)
LOAD = ReplicaSnapshot(
    prefill_tokens_per_s=1000.0,
    written_bytes_per_s=1e9,
    read_bytes_per_s=1e9,
    decode_step_s=0.02,
)

NOTHING = BlockEvents()


@dataclass
class Feed:
    """One replica's, connected to `states`."""

    states: ReplicaStates
    replica: str
    node: str = "node"
    incarnation: str = "1"
    engine: EngineInfo = ENGINE
    load: ReplicaSnapshot = LOAD
    sequence: int = 0
    device: set[bytes] = field(default_factory=set)
    host: set[bytes] = field(default_factory=set)

    def connect(self, now: float = 0.0) -> Feed:
        greeting = FeedGreeting(self.replica, self.incarnation, self.node, self.engine)
        self.states.greet(greeting, now)
        snapshot = FeedSnapshot(self.sequence, tuple(self.device), tuple(self.host), self.load)
        self.states.reset(self.replica, snapshot, now)
        return self

    def step(self, now: float, events: BlockEvents = NOTHING, **load: float) -> bool:
        """Something happens, and is told."""
        return self.states.apply(self.replica, self.happen(events, **load), now)

    def happen(self, events: BlockEvents = NOTHING, **load: float) -> FeedStep:
        """Something happens; whoever is given the step may lose it."""
        self.load = replace(self.load, **load)  # type: ignore[arg-type]
        self.sequence += 1
        if events.cleared:
            self.device, self.host = set(), set()
        self.device = (self.device | {*events.stored, *events.restored}) - {*events.removed}
        self.host = (self.host | {*events.offloaded}) - {*events.dropped}
        return FeedStep(self.sequence, events, self.load)
