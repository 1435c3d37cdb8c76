"""What simulated replicas tell the router, as their real feeds would."""

from __future__ import annotations

from replicas.core import replica_snapshot
from replicas.protocol import BlockEvents, FeedGreeting, FeedSnapshot, FeedStep, ReplicaSnapshot
from router.replica_states import ReplicaStates
from router.simulator.replica import ReplicaSettings, SimulatedReplica


class SimulatedFeed:
    """The feed of one replica: a greeting and a snapshot at the start, then a frame a step, and
    a repetition now and then while there are none."""

    def __init__(self, replica_id: str, replica: SimulatedReplica, states: ReplicaStates) -> None:
        self._replica_id = replica_id
        self._replica = replica
        self._states = states
        self._sequence = 0
        self._delivered = 0
        self._load = ReplicaSnapshot()

    @property
    def settled(self) -> bool:
        """Whether the router knows all that was sent."""
        return self._delivered == self._sequence

    def open(self, settings: ReplicaSettings, node: str, now: float) -> None:
        """Say who publishes, on which node, and that there is nothing yet."""
        greeting = FeedGreeting(
            replica_id=self._replica_id,
            incarnation="simulated",
            node_id=node,
            engine=settings.engine,
        )
        self._states.greet(greeting, now)
        self._load = replica_snapshot.take(self._replica.scheduler)
        self._states.reset(self._replica_id, FeedSnapshot(0, (), (), self._load), now)

    def frame(self) -> FeedStep:
        """What happened since the last frame."""
        self._load = replica_snapshot.take(self._replica.scheduler)
        return self._next(self._load, self._replica.events.take())

    def repetition(self) -> FeedStep:
        """That nothing happened since the last frame."""
        return self._next(self._load, BlockEvents())

    def deliver(self, step: FeedStep, now: float) -> None:
        """The frame has reached the router."""
        self._delivered = step.sequence
        if not self._states.apply(self._replica_id, step, now):
            raise AssertionError(f"a gap in the feed of {self._replica_id}")

    def _next(self, load: ReplicaSnapshot, events: BlockEvents) -> FeedStep:
        self._sequence += 1
        return FeedStep(self._sequence, events, load)
