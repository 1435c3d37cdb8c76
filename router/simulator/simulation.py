"""A trace over simulated replicas: a discrete-event loop with the real placement."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum

from replicas.core.scheduler import RequestRefusedError
from replicas.core.scheduler_output import StepOutcome
from replicas.protocol import FeedStep
from router.placement import Placer
from router.simulator.feed import SimulatedFeed
from router.simulator.measurements import Measurements
from router.simulator.node import Node
from router.simulator.replica import ReplicaSettings, SimulatedReplica, make_request
from router.simulator.trace import Trace, TraceRequest

_PERIOD_S = 1.0
"""As the real feed's: what a replica lets pass before it says the same again."""


class _Event(IntEnum):
    """What of things that happen at the same moment comes first."""

    FEED = 0
    STEP_END = 1


class Simulation:
    """One run. Costs nothing while replicas are idle: time jumps to the next arrival, end of a
    step or frame of a feed, and ties are broken by order, so that equal inputs give equal runs."""

    def __init__(
        self,
        trace: Trace,
        settings: ReplicaSettings,
        placer: Placer,
        *,
        num_replicas: int,
        replicas_a_node: int = 1,
        feed_delay_s: float = 0.0,
        max_tokens: int | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """The `replicas_a_node` of a machine read each other's host tiers. `feed_delay_s` passes
        between the end of a step and the router's knowing of it. Clients ask for `max_tokens` at
        the most; None takes the trace's longest output. `progress` is told how many requests
        have ended."""
        indices = range(num_replicas)
        nodes = [Node(f"node-{at}") for at in indices[::replicas_a_node]]
        self._node_of = [nodes[index // replicas_a_node] for index in indices]
        self.replicas = [SimulatedReplica(settings, node) for node in self._node_of]
        self._start_s = trace.requests[0].arrived_s if trace.requests else 0.0
        self.measurements = Measurements(num_replicas, self._start_s)
        self._trace = trace
        self._placer = placer
        self._feed_delay_s = feed_delay_s
        longest = max((each.num_output_tokens for each in trace.requests), default=1)
        self._max_tokens = max_tokens or longest
        self._progress = progress
        self._ids = [f"replica-{index}" for index in indices]
        self._index_of = {name: index for index, name in enumerate(self._ids)}
        self._feeds = [
            SimulatedFeed(name, replica, placer.states)
            for name, replica in zip(self._ids, self.replicas, strict=True)
        ]
        self._settings = settings
        self._events: list[tuple[float, _Event, int, int, FeedStep | None]] = []
        self._order = 0
        self._heard: dict[int, float] = {}
        """When each replica's last word came, the oldest first."""

    def run(self) -> Measurements:
        """Serve the whole trace; gives what was measured."""
        requests = self._trace.requests
        for index, feed in enumerate(self._feeds):
            feed.open(self._settings, self._node_of[index].name, self._start_s)
            self._heard[index] = self._start_s
        number = 0
        while number < len(requests) or self._events:
            arrives = number < len(requests)
            if arrives and (not self._events or requests[number].arrived_s < self._events[0][0]):
                self._arrive(requests[number], number)
                number += 1
            else:
                self._handle(*heapq.heappop(self._events))
        return self.measurements.close(self.replicas)

    def _handle(
        self, now: float, event: _Event, order: int, index: int, frame: FeedStep | None
    ) -> None:
        if event is _Event.FEED and frame is not None:
            self._deliver(index, frame, now)
            return
        replica = self.replicas[index]
        outcome = replica.end_step(now)
        self._note_ended(index, outcome, now)
        self._publish(index, now)
        if not replica.idle:
            self._begin_step(index, now)

    def _repeat(self, now: float) -> None:
        """Silent replicas have repeated themselves meanwhile: it matters when somebody asks."""
        due = now - _PERIOD_S
        while self._heard:
            index, heard_at = next(iter(self._heard.items()))
            if heard_at > due:
                return
            feed = self._feeds[index]
            if feed.settled:
                feed.deliver(feed.repetition(), now)
            self._note_heard(index, now)

    def _note_heard(self, index: int, now: float) -> None:
        self._heard.pop(index, None)
        self._heard[index] = now

    def _arrive(self, request: TraceRequest, number: int) -> None:
        now = request.arrived_s
        data = make_request(
            request,
            number,
            self._trace.block_size,
            max(self._max_tokens, request.num_output_tokens),
        )
        self._repeat(now)
        placement = self._placer.place(data.request_id, data, self._ids, now)
        chosen = placement.ranked[0]
        self._placer.routed(data.request_id, chosen, now)
        index = self._index_of[chosen]
        replica = self.replicas[index]
        try:
            replica.add(data, number, request.num_output_tokens, now)
        except RequestRefusedError:
            self._placer.completed(data.request_id)
            self.measurements.note_refused()
            return
        self.measurements.note_placed(index)
        if not replica.stepping:
            self._begin_step(index, now)

    def _begin_step(self, index: int, now: float) -> None:
        self._push(self.replicas[index].begin_step(now), _Event.STEP_END, index)

    def _note_ended(self, index: int, outcome: StepOutcome, now: float) -> None:
        self.measurements.note_step(outcome)
        if not outcome.finished:
            return
        for delta in outcome.deltas:
            if delta.finish_reason is not None:
                self._placer.completed(delta.request_id)
                self.replicas[index].forget(delta.request_id)
        self.measurements.note_finished(outcome, now)
        self._progress(self.measurements.num_ended)

    def _publish(self, index: int, now: float) -> None:
        feed = self._feeds[index]
        if self._feed_delay_s:
            self._push(now + self._feed_delay_s, _Event.FEED, index, feed.frame())
        else:
            self._deliver(index, feed.frame(), now)

    def _deliver(self, index: int, frame: FeedStep, now: float) -> None:
        self._feeds[index].deliver(frame, now)
        self._note_heard(index, now)

    def _push(self, at: float, event: _Event, index: int, frame: FeedStep | None = None) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, event, self._order, index, frame))
