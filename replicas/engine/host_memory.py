"""The host tier of one engine: its memory, its books and its copier, put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from replicas.core.block_events import BlockEventLog
from replicas.core.block_hash import BlockHasher
from replicas.core.block_pool import BlockPool
from replicas.core.cost_model import CostModel
from replicas.core.host_tier import HostTier
from replicas.core.offloader import Offloader
from replicas.engine import probe
from replicas.engine.host_copier import HostCopier
from replicas.engine.in_flight import Runner
from replicas.engine.kv_pool import KVPool
from replicas.host_store import HostStore

OpenStore = Callable[[bytes, int], HostStore | None]
"""(identity of the blocks' format, bytes of a block) -> their memory; None where there is none
to be had."""

MakeCopier = Callable[[KVPool, HostStore, Callable[[], float]], HostCopier]
"""(pool, store, clock) -> who copies between them."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Everything an engine needs to keep blocks on the host."""

    offloader: Offloader
    copier: HostCopier
    store: HostStore
    pool: KVPool
    clock: Callable[[], float]

    @classmethod
    def open(
        cls,
        open_store: OpenStore | None,
        pool: KVPool,
        block_pool: BlockPool,
        hasher: BlockHasher,
        clock: Callable[[], float],
        make_copier: MakeCopier,
        events: BlockEventLog | None,
    ) -> HostMemory | None:
        """None where there is no memory. `events` is told what can be read from it."""
        if open_store is None:
            return None
        store = open_store(hasher.identity(pool.layout), pool.block_bytes)
        if store is None:
            return None
        tier = HostTier(store.num_slots, events)
        for slot, digest in store.inventory():
            tier.adopt(slot, digest)
        offloader = Offloader(block_pool, tier, store.find)
        return cls(offloader, make_copier(pool, store, clock), store, pool, clock)

    @property
    def num_slots(self) -> int:
        """Blocks that fit."""
        return self.store.num_slots

    def probe(self, runner: Runner, max_tokens: int) -> CostModel:
        """A cost model that begins with what this machine does now. Before anything is served."""
        taken = {slot for slot, _ in self.store.inventory()}
        free = [slot for slot in range(self.store.num_slots) if slot not in taken]
        rates = probe.measure(
            runner,
            self.pool,
            self.copier,
            max_tokens=max_tokens,
            free_slots=free,
            clock=self.clock,
        )
        for slot in free[: probe.MAX_SLOTS]:
            self.store.drop(slot)
        return CostModel(self.pool.block_bytes, rates)

    def close(self) -> None:
        """Give the memory up."""
        self.store.close()
