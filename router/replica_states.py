"""What the replicas say of themselves: their blocks go to the index, their load is kept here."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf

from replicas.protocol import BlockEvents, FeedGreeting, FeedSnapshot, FeedStep, ReplicaSnapshot
from router.holders import Tier
from router.prefix_index import PrefixIndex

STALE_AFTER_S = 5.0
"""A feed says something every second, however long a step takes."""
ORPHAN_S = 60.0
"""How long the keeper of a node leaves a dead replica's host memory readable."""
_PREEMPTION_WINDOW_S = 60.0


@dataclass(slots=True)
class ReplicaState:
    """The latest from one replica."""

    greeting: FeedGreeting
    connected: bool = False
    """Whether the feed is open and has lost nothing since its last snapshot."""
    sequence: int = -1
    load: ReplicaSnapshot = field(default_factory=ReplicaSnapshot)
    received_at: float = -inf
    """When the replica was last heard of."""
    reported_at: float = -inf
    """When `load` came, if with a step: a snapshot's may be a while old."""
    previous_at: float = -inf
    """When the load before it came. What had arrived at the replica by then is part of `load`:
    a step begins by taking in all that has arrived."""
    preemptions_per_s: float = 0.0
    """Over the last minute, roughly."""

    def is_fresh(self, now: float) -> bool:
        """Whether it can be believed."""
        return self.connected and now - self.received_at <= STALE_AFTER_S

    def begin(self, snapshot: FeedSnapshot, now: float) -> None:
        """All anew, over a new connection."""
        self.connected = True
        self._take(snapshot.sequence, snapshot.load, now)
        self.previous_at = self.reported_at = -inf

    def go_on(self, step: FeedStep, now: float) -> None:
        """The next word. One that repeats the load comes from within a long step, and contains
        nothing that arrived since."""
        repeated = step.events.empty and step.load == self.load
        self._take(step.sequence, step.load, now)
        if not repeated:
            self.previous_at, self.reported_at = self.reported_at, now

    def _take(self, sequence: int, load: ReplicaSnapshot, now: float) -> None:
        if self.received_at > -inf:
            decay = exp((self.received_at - now) / _PREEMPTION_WINDOW_S)
            new = max(0, load.preemptions - self.load.preemptions)
            rate = self.preemptions_per_s * decay + new / _PREEMPTION_WINDOW_S
            self.preemptions_per_s = rate
        self.sequence, self.load, self.received_at = sequence, load, now


class ReplicaStates:
    """States by replica, and the index that their blocks go to.

    The order is: `greet`, `reset` with a snapshot, `apply` a step after the other. A gap in the
    steps, and a connection that ended, make the state stale until the next `reset`; what was
    known stays in the index, but a stale replica's hits are not to be believed.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.gaps = 0
        """Feeds that lost steps and had to begin anew."""
        self._states: dict[str, ReplicaState] = {}
        self._orphans: dict[str, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._states)

    def get(self, replica_id: str) -> ReplicaState | None:
        """None before the replica's first greeting and after `forget`."""
        return self._states.get(replica_id)

    def greet(self, greeting: FeedGreeting, now: float) -> None:
        """A feed was opened. Of another incarnation than before nothing is left."""
        replica_id = greeting.replica_id
        known = self._states.get(replica_id)
        if known is not None and known.greeting.incarnation == greeting.incarnation:
            known.connected = False
            return
        self.index.drop(replica_id)
        self._orphans.pop(replica_id, None)
        self.index.join(replica_id, greeting.node_id)
        self._states[replica_id] = ReplicaState(greeting)

    def reset(self, replica_id: str, snapshot: FeedSnapshot, now: float) -> None:
        """All that the replica has. Ignored where `forget` came in between."""
        state = self._states.get(replica_id)
        if state is None:
            return
        if state.received_at == -inf:
            self._adopt(state.greeting.node_id)
        self.index.clear(replica_id, Tier.DEVICE, Tier.HOST)
        self.index.store(replica_id, snapshot.device, Tier.DEVICE)
        self.index.store(replica_id, snapshot.host, Tier.HOST)
        state.begin(snapshot, now)

    def apply(self, replica_id: str, step: FeedStep, now: float) -> bool:
        """One step. False: steps are missing before it, or there was no snapshot yet; the feed
        has to be opened anew. A step that is known already changes nothing."""
        self.index.tidy()
        state = self._states.get(replica_id)
        if state is None or not state.connected:
            return False
        if step.sequence <= state.sequence:
            return True
        if step.sequence > state.sequence + 1:
            state.connected = False
            self.gaps += 1
            return False
        self._apply_events(replica_id, step.events)
        state.go_on(step, now)
        return True

    def lose(self, replica_id: str, now: float) -> None:
        """The connection has ended."""
        state = self._states.get(replica_id)
        if state is not None:
            state.connected = False

    def forget(self, replica_id: str) -> None:
        """The replica has gone, and its device with it. Its host memory stays readable on its
        node until it is given to a successor or its keeper frees it. May be told again: Serve
        does so for each call that failed there."""
        if replica_id in self._orphans:
            return
        state = self._states.pop(replica_id, None)
        if state is None or state.received_at == -inf or not state.greeting.engine.host_blocks:
            self.index.drop(replica_id)
            return
        self.index.clear(replica_id, Tier.DEVICE)
        self.index.unexpect_all(replica_id)
        self._orphans[replica_id] = (state.greeting.node_id, state.received_at + ORPHAN_S)

    def expire(self, now: float) -> None:
        """Let go of host memory that its keeper has freed by now."""
        if self._orphans:
            self._drop_orphans([r for r, (_, until) in self._orphans.items() if until <= now])

    def _adopt(self, node: str) -> None:
        """A new replica's first snapshot lists what it took over from a dead one of its node: the
        latter's entries would never be taken back."""
        if self._orphans:
            self._drop_orphans([r for r, (where, _) in self._orphans.items() if where == node])

    def _drop_orphans(self, replicas: list[str]) -> None:
        for replica in replicas:
            del self._orphans[replica]
            self.index.drop(replica)

    def _apply_events(self, replica_id: str, events: BlockEvents) -> None:
        index = self.index
        if events.cleared:
            index.clear(replica_id, Tier.DEVICE, Tier.HOST)
        for digests in (events.stored, events.restored):
            index.store(replica_id, digests, Tier.DEVICE)
        index.remove(replica_id, events.removed, Tier.DEVICE)
        index.unexpect(replica_id, events.removed)
        index.store(replica_id, events.offloaded, Tier.HOST)
        index.remove(replica_id, events.dropped, Tier.HOST)
