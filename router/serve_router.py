"""Serve's RequestRouter seam: the only place here that knows ray."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from replicas.feed_wire import METADATA_KEY
from replicas.protocol import FeedAddress, GenerateRequest
from router import metrics
from router.event_feed import EventFeed
from router.placement import POLICIES, Placement, Placer
from router.replica_states import STALE_AFTER_S

logger = logging.getLogger("ray.serve")

AVOIDED_FOR_S = STALE_AFTER_S + 1.0
"""A call for which only replicas are left that failed it before waits so long before it goes to
one of them: by then one that has died does not look fresh any more."""


class QuireRouter(RequestRouter):
    """Asks the Placer; Serve then sends the request to the first rank that has room.

    Without Serve's FIFOMixin: a request gets the replica chosen for IT. Each call needs an
    internal request id of its own, or siblings of one HTTP request are taken for each other.

    Serve calls everything here on the event loop of the handle's router, where the replicas'
    feeds are followed too: nothing waits, and nothing needs a lock.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """`policy`: a key of POLICIES."""
        self._placer = Placer(POLICIES[kwargs["policy"]]())
        self._feeds: dict[ReplicaID, EventFeed] = {}
        self._told_gaps = self._told_refused = 0
        metrics.REPLICAS.labels("fresh").set_function(lambda: len(self._fresh()))
        metrics.REPLICAS.labels("stale").set_function(
            lambda: len(self.curr_replicas) - len(self._fresh())
        )

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        present = {replica.replica_id for replica in replicas}
        for replica_id in (self.curr_replicas.keys() | self._feeds.keys()) - present:
            self._forget(replica_id)
        for replica in replicas:
            self._follow(replica)
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        args = [] if pending_request is None else pending_request.args
        if pending_request is None or not args or not isinstance(args[0], GenerateRequest):
            return [candidate_replicas]
        # All replicas are considered at once: if none takes the request, wait before asking again.
        pending_request.routing_context.should_backoff = True
        request, dispatch = args[0], args[1]
        by_id = self._acceptable(candidate_replicas, pending_request)
        if not by_id and dispatch.within_s is None:
            return []  # Serve asks again, perhaps with one that takes a lost one's place
        if not by_id:
            return _declined(pending_request, candidate_replicas)
        call_id = pending_request.metadata.internal_request_id
        placement = self._place(call_id, request, list(by_id), dispatch.within_s)
        logger.debug("request %s: %s", request.request_id, placement)
        if placement.declined:
            return _declined(pending_request, candidate_replicas)
        if request.explain:
            why = json.dumps(placement.as_dict())
            pending_request.args = [request, dataclasses.replace(dispatch, placement=why)]
        return [[by_id[replica]] for replica in placement.ranked]

    def _acceptable(
        self, candidates: list[RunningReplica], pending_request: PendingRequest
    ) -> dict[str, RunningReplica]:
        """By name: those that the call does not avoid. Where none is left, and none has come for
        a while, those that are well after all: what failed may have been the way there."""
        by_id = {replica.replica_id.unique_id: replica for replica in candidates}
        dispatch = pending_request.args[1]
        others = {name: each for name, each in by_id.items() if name not in dispatch.avoid}
        waited_s = time.time() - pending_request.created_at
        if others or dispatch.within_s is not None or waited_s < AVOIDED_FOR_S:
            return others
        fresh = self._fresh()
        return {name: each for name, each in by_id.items() if name in fresh}

    def _fresh(self) -> set[str]:
        """Of the replicas that Serve names, those whose feeds can be believed."""
        now, states = time.monotonic(), self._placer.states
        found = (states.get(each.unique_id) for each in list(self.curr_replicas))
        return {s.greeting.replica_id for s in found if s is not None and s.is_fresh(now)}

    def _place(
        self, call_id: str, request: GenerateRequest, replicas: list[str], within_s: float | None
    ) -> Placement:
        begin = time.monotonic()
        placement = self._placer.place(call_id, request, replicas, begin, within_s)
        metrics.DECISION_SECONDS.observe(time.monotonic() - begin)
        if not (placement.declined or placement.again):
            metrics.PLACEMENTS.labels(placement.policy).inc()
            metrics.STALE_PLACEMENTS.inc(placement.stale)
        self._tell()
        return placement

    def _tell(self) -> None:
        """What the states have counted since the last time."""
        states = self._placer.states
        gaps, refused = states.gaps, states.index.refused
        metrics.FEED_GAPS.inc(gaps - self._told_gaps)
        metrics.INDEX_REFUSED.inc(refused - self._told_refused)
        self._told_gaps, self._told_refused = gaps, refused
        metrics.INDEX_BLOCKS.set(len(states.index))

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        call_id = pending_request.metadata.internal_request_id
        self._placer.routed(call_id, replica_id.unique_id, time.monotonic())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._placer.completed(internal_request_id, replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        self._forget(replica_id)
        super().on_replica_actor_died(replica_id)

    def _follow(self, replica: RunningReplica) -> None:
        address = replica.replica_metadata.get(METADATA_KEY)
        if address is None or replica.replica_id in self._feeds:
            return
        feed = EventFeed(replica.replica_id.unique_id, FeedAddress(**address), self._placer.states)
        feed.start()
        self._feeds[replica.replica_id] = feed

    def _forget(self, replica_id: ReplicaID) -> None:
        feed = self._feeds.pop(replica_id, None)
        if feed is not None:
            feed.stop()
        self._placer.forget(replica_id.unique_id)


def _declined(
    pending_request: PendingRequest, candidates: list[RunningReplica]
) -> list[list[RunningReplica]]:
    """Any replica will do to end a call that none is good enough for."""
    request, dispatch = pending_request.args
    pending_request.args = [request, dataclasses.replace(dispatch, declined=True)]
    return [candidates]
