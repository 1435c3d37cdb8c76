"""Serve's RequestRouter seam: the only place here that knows ray."""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from replicas.protocol import GenerateRequest
from router.placement import POLICIES, Placer


class QuireRouter(RequestRouter):
    """Asks the Placer; Serve then sends the request to the first rank that has room.

    Without Serve's FIFOMixin: a request gets the replica chosen for IT. Each call needs an
    internal request id of its own, or siblings of one HTTP request are taken for each other.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """`policy`: a key of POLICIES; `block_size`: tokens a block holds."""
        self._placer = Placer(POLICIES[kwargs["policy"]](), kwargs["block_size"])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        gone = set(self.curr_replicas) - {replica.replica_id for replica in replicas}
        for replica_id in gone:
            self._placer.forget(replica_id.unique_id)
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        args = [] if pending_request is None else pending_request.args
        if pending_request is None or not args or not isinstance(args[0], GenerateRequest):
            return [candidate_replicas]
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        order = self._placer.place(
            pending_request.metadata.internal_request_id,
            args[0],
            list(by_id),
            time.monotonic(),
        )
        return [[by_id[replica]] for replica in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        self._placer.routed(pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._placer.completed(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        self._placer.forget(replica_id.unique_id)
        super().on_replica_actor_died(replica_id)
