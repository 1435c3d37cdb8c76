"""A rival's policy in the place of our Placer, over simulated replicas with the real scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from replicas.core import replica_snapshot
from replicas.protocol import GenerateRequest, ReplicaSnapshot
from router.placement import Placement
from router.prefix_index import NO_HIT, Hit, PrefixIndex
from router.prompt_chains import PromptChains
from router.replica_states import ReplicaStates
from router.simulator.replica import SimulatedReplica
from tests.benchmarks.router_model.peers import Policy
from tests.benchmarks.router_model.workload import BLOCK_TOKENS, Request

_MAX_BLOCKS = 16_000_000


class View:
    """A replica as it truly is when a request comes: no word of it is late, and nothing is
    forgotten. The peers' policies take it for the simple model's replica."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_flight = 0
        self._load = ReplicaSnapshot()
        self._hit: Hit = NO_HIT
        self._active = Counter[int]()

    def see(self, replica: SimulatedReplica, hit: Hit) -> None:
        """What the next questions are answered from."""
        self._load = replica_snapshot.take(replica.scheduler)
        self._hit = hit

    @property
    def queued_tokens(self) -> int:
        return self._load.queued_tokens

    @property
    def waiting(self) -> int:
        return self._load.waiting

    @property
    def running(self) -> int:
        return self._load.running

    def uncached_tokens(self, request: Request) -> int:
        found = (self._hit.device + self._hit.host) * BLOCK_TOKENS
        return request.prompt_tokens - min(found, request.prompt_tokens - 1)

    def active_blocks(self, request: Request | None = None) -> int:
        """Different blocks of all requests in flight, and of `request` as if it were there."""
        more = () if request is None else request.blocks
        return len(self._active) + sum(block not in self._active for block in more)

    def begin(self, blocks: Sequence[int]) -> None:
        self.in_flight += 1
        self._active.update(blocks)

    def end(self, blocks: Sequence[int]) -> None:
        self.in_flight -= 1
        self._active.subtract(blocks)
        for block in blocks:
            if not self._active[block]:
                del self._active[block]


class Rival:
    """Answers where a Simulation asks its Placer."""

    def __init__(self, policy: Policy, requests: Sequence[Request]) -> None:
        """Requests are known by their number, their true output with them."""
        self.states = ReplicaStates(PrefixIndex(_MAX_BLOCKS))
        self._policy = policy
        self._requests = requests
        self._prompts = PromptChains()
        self._views: dict[str, View] = {}
        self._at: dict[str, View] = {}
        self._replicas: Sequence[SimulatedReplica] = ()

    def watch(self, replicas: Sequence[SimulatedReplica]) -> None:
        """Those that it is going to be asked about, in the simulation's order."""
        self._replicas = replicas

    def place(
        self, call_id: str, request: GenerateRequest, replicas: Sequence[str], now: float
    ) -> Placement:
        """The policy's choice."""
        known = [state for state in map(self.states.get, replicas) if state is not None]
        (chain,) = self._prompts.of(request, known).values()
        hits = self.states.index.match(chain)
        for name, replica in zip(replicas, self._replicas, strict=True):
            self._views.setdefault(name, View(name)).see(replica, hits.get(name, NO_HIT))
        asked = self._requests[int(call_id)]
        views: list[Any] = [self._views[name] for name in replicas]
        chosen = self._policy.choose(asked, views)
        self._at[call_id] = self._views[chosen.name]
        self._at[call_id].begin(asked.blocks)
        return Placement((chosen.name,), "rival", "", stale=False)

    def routed(self, call_id: str, replica: str, now: float) -> None:
        """It was accepted."""

    def completed(self, call_id: str, replica: str | None = None) -> None:
        """It has ended."""
        self._at.pop(call_id).end(self._requests[int(call_id)].blocks)
