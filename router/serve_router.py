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

logger = logging.getLogger("ray.serve")


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
        by_id = {
            replica.replica_id.unique_id: replica
            for replica in candidate_replicas
            if replica.replica_id.unique_id not in dispatch.avoid
        }
        if not by_id and dispatch.within_s is None:
            return []  # Serve asks again, with the replica that takes a lost one's place
        if not by_id:
            return _declined(pending_request, candidate_replicas)
        call_id = pending_request.metadata.internal_request_id
        placement = self._place(call_id, request, list(by_id))
        logger.debug("request %s: %s", request.request_id, placement)
        if dispatch.within_s is not None and placement.cost_s > dispatch.within_s:
            self._placer.completed(call_id)
            return _declined(pending_request, candidate_replicas)
        if request.explain:
            why = json.dumps(placement.as_dict())
            pending_request.args = [request, dataclasses.replace(dispatch, placement=why)]
        return [[by_id[replica]] for replica in placement.ranked]

    def _place(self, call_id: str, request: GenerateRequest, replicas: list[str]) -> Placement:
        begin = time.monotonic()
        placement = self._placer.place(call_id, request, replicas, begin)
        metrics.DECISION_SECONDS.observe(time.monotonic() - begin)
        metrics.PLACEMENTS.labels(placement.policy).inc()
        metrics.STALE_PLACEMENTS.inc(placement.stale)
        metrics.INDEX_BLOCKS.set(len(self._placer.states.index))
        return placement

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
