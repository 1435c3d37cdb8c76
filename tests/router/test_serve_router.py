"""The seam to Serve: feeds follow the replicas, and calls go where the Placer says."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve._private.request_router.common import PendingRequest

from replicas.core.block_hash import BlockHasher
from replicas.core.sampling_params import SamplingParams
from replicas.feed import FeedServer
from replicas.protocol import (
    BlockEvents,
    Dispatch,
    EngineInfo,
    GenerateRequest,
    ReplicaSnapshot,
    ReplyAddress,
)
from router import metrics
from router.serve_router import AVOIDED_FOR_S, QuireRouter

TIMEOUT_S = 20.0
DEPLOYMENT = DeploymentID(name="replicas", app_name="test")
ENGINE = EngineInfo("cpu", "float32", "float32", 4, 100, 1000, 50, fingerprint="model")
PROMPT = tuple(range(1, 18))


class FakeReplica:
    """What QuireRouter and its base class ask of a RunningReplica."""

    def __init__(self, name: str, metadata: dict[str, Any]) -> None:
        self.replica_id = ReplicaID(unique_id=name, deployment_id=DEPLOYMENT)
        self.replica_metadata = metadata
        self.max_ongoing_requests = 100

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


class Cluster:
    """Replicas that publish feeds, and the router that follows them."""

    def __init__(self) -> None:
        self.router = QuireRouter(
            deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA
        )
        self.router.initialize_state(policy="prefix_aware")
        self.servers: dict[str, FeedServer] = {}
        self.replicas: dict[str, FakeReplica] = {}
        self.unwell: set[str] = set()

    async def add(self, name: str) -> None:
        server = self.servers[name] = FeedServer(
            "127.0.0.1", name, "node", is_well=lambda: name not in self.unwell
        )
        server.publish(BlockEvents(), ReplicaSnapshot())
        address = await server.start(ENGINE)
        where = {"host": address.host, "port": address.port, "token": address.token}
        self.replicas[name] = FakeReplica(name, {"feed": where})

    def update(self, *names: str) -> None:
        self.router.update_replicas([self.replicas[name] for name in names])  # type: ignore[misc]

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(5000):
            if condition():
                return
            await asyncio.sleep(0.002)
        pytest.fail("it never happens")

    def knows(self, name: str) -> bool:
        state = self.router._placer.states.get(name)
        return state is not None and state.connected

    def feed(self, name: str) -> asyncio.Task[None]:
        task = self.router._feeds[self.replicas[name].replica_id]._task
        assert task is not None
        return task

    async def choose(self, call: PendingRequest) -> list[str]:
        candidates = list(self.router.curr_replicas.values())
        ranks = await self.router.choose_replicas(candidates, call)
        assert all(len(rank) == 1 for rank in ranks)
        return [rank[0].replica_id.unique_id for rank in ranks]


def call(
    name: str,
    *,
    avoid: tuple[str, ...] = (),
    explain: bool = False,
    within_s: float | None = None,
    age_s: float = 0.0,
) -> PendingRequest:
    request = GenerateRequest(name, PROMPT, SamplingParams(max_tokens=4, seed=1), explain=explain)
    dispatch = Dispatch(ReplyAddress("127.0.0.1", 1, "token"), frozenset(avoid), within_s)
    metadata = RequestMetadata(request_id=name, internal_request_id=name)
    return PendingRequest([request, dispatch], {}, metadata, time.time() - age_s)


def value(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


def run(scenario: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        cluster = Cluster()
        async with asyncio.timeout(TIMEOUT_S):
            await scenario(cluster)
            cluster.update()
        for server in cluster.servers.values():
            server.stop()

    asyncio.run(main())


def test_a_feed_is_followed_for_as_long_as_serve_names_the_replica() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.add("a")
        await cluster.add("b")
        cluster.update("a")
        await cluster.until(lambda: cluster.knows("a"))
        cluster.update("a", "b")
        cluster.update("a", "b")
        await cluster.until(lambda: cluster.knows("b"))
        assert [server.num_consumers for server in cluster.servers.values()] == [1, 1]
        followed = cluster.feed("a")
        cluster.update("b")
        await asyncio.wait({followed}, timeout=5.0)
        assert followed.cancelled()
        await cluster.until(lambda: not cluster.servers["a"].num_consumers)
        assert cluster.router._placer.states.get("a") is None
        assert cluster.knows("b")

    run(scenario)


def test_a_dead_replica_is_forgotten_at_once() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.add("a")
        cluster.update("a")
        await cluster.until(lambda: cluster.knows("a"))
        followed = cluster.feed("a")
        cluster.router.on_replica_actor_died(cluster.replicas["a"].replica_id)
        assert cluster.router._placer.states.get("a") is None
        assert not cluster.router.curr_replicas
        await asyncio.wait({followed}, timeout=5.0)
        assert followed.cancelled()

    run(scenario)


def test_a_replica_without_a_feed_is_a_candidate_too() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.replicas["plain"] = FakeReplica("plain", {})
        cluster.update("plain")
        assert await cluster.choose(call("one")) == ["plain"]

    run(scenario)


def test_a_call_goes_where_its_prefix_is() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name in ("a", "b", "c"):
            await cluster.add(name)
        cluster.update("a", "b", "c")
        hasher = BlockHasher(fingerprint="model", kv_dtype="float32", block_size=4)
        events = BlockEvents(stored=tuple(hasher.chain(PROMPT)))
        cluster.servers["b"].publish(events, ReplicaSnapshot())
        states = cluster.router._placer.states
        await cluster.until(lambda: all(map(cluster.knows, "abc")))
        await cluster.until(lambda: (s := states.get("b")) is not None and s.sequence > 1)
        ranked = await cluster.choose(call("one"))
        assert ranked[0] == "b"
        assert sorted(ranked) == ["a", "b", "c"]

    run(scenario)


def test_replicas_that_failed_a_call_are_avoided_and_it_waits_if_there_is_no_other() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name in ("a", "b"):
            await cluster.add(name)
        cluster.update("a", "b")
        assert await cluster.choose(call("one", avoid=("a",))) == ["b"]
        waiting = call("two", avoid=("a", "b"))
        assert await cluster.choose(waiting) == []
        assert waiting.routing_context.should_backoff

    run(scenario)


def test_where_only_replicas_are_left_that_failed_a_call_it_tries_one_that_is_well_again() -> None:
    """A lost connection is not the end of a replica; a failed engine is, and its feed tells."""

    async def scenario(cluster: Cluster) -> None:
        for name in ("a", "b", "c"):
            await cluster.add(name)
        cluster.replicas["no feed"] = FakeReplica("no feed", {})
        cluster.update("a", "b", "no feed")
        await cluster.until(lambda: cluster.knows("a") and cluster.knows("b"))
        all_failed = ("a", "b", "no feed")

        async def chosen(age_s: float) -> list[str]:
            return sorted(await cluster.choose(call("one", avoid=all_failed, age_s=age_s)))

        assert await chosen(AVOIDED_FOR_S - 1.0) == []
        assert await chosen(AVOIDED_FOR_S) == ["a", "b"]
        moving = call("two", avoid=all_failed, age_s=AVOIDED_FOR_S, within_s=1000.0)
        await cluster.router.choose_replicas(list(cluster.router.curr_replicas.values()), moving)
        assert moving.args[1].declined, "it has a replica"
        cluster.unwell.add("b")
        await cluster.until(lambda: not cluster.knows("b"))
        assert await chosen(AVOIDED_FOR_S) == ["a"]
        cluster.update("a", "b", "c")
        await cluster.until(lambda: cluster.knows("c"))
        assert await chosen(AVOIDED_FOR_S) == ["c"], "another one comes first"

    run(scenario)


def test_metrics_tell_of_partial_blindness() -> None:
    async def scenario(cluster: Cluster) -> None:
        gaps, refused = (
            value("quire:feed_gaps_total"),
            value("quire:prefix_index_refused_blocks_total"),
        )
        for name in ("a", "b"):
            await cluster.add(name)
        cluster.replicas["no feed"] = FakeReplica("no feed", {})
        cluster.update("a", "b", "no feed")
        await cluster.until(lambda: cluster.knows("a") and cluster.knows("b"))
        assert value("quire:router_replicas", feed="fresh") == 2
        assert value("quire:router_replicas", feed="stale") == 1
        cluster.unwell.add("b")
        await cluster.until(lambda: not cluster.knows("b"))
        assert value("quire:router_replicas", feed="fresh") == 1
        assert value("quire:router_replicas", feed="stale") == 2
        states = cluster.router._placer.states
        states.gaps += 2
        states.index.refused += 5
        for name in ("one", "two"):
            await cluster.choose(call(name))
        assert value("quire:feed_gaps_total") == gaps + 2
        assert value("quire:prefix_index_refused_blocks_total") == refused + 5

    run(scenario)


def test_metrics_count_a_request_once_and_only_if_it_is_placed() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.add("a")
        cluster.update("a")
        before = value("quire:placements_total", policy="prefix_aware")
        stale = value("quire:stale_placements_total")
        for _ in range(3):
            await cluster.choose(call("waits"))
        await cluster.router.choose_replicas(
            list(cluster.router.curr_replicas.values()), call("moves", within_s=1e-9)
        )
        assert value("quire:placements_total", policy="prefix_aware") == before + 1
        assert value("quire:stale_placements_total") == stale + 1

    run(scenario)


def test_a_call_that_asks_for_it_carries_the_reason() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.add("a")
        cluster.update("a")
        asks, does_not = call("asks", explain=True), call("does not")
        for each in (asks, does_not):
            await cluster.choose(each)
        assert json.loads(asks.args[1].placement)["chosen"] == "a"
        assert does_not.args[1].placement is None

    run(scenario)


def test_bookings_follow_the_call() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name in ("a", "b"):
            await cluster.add(name)
        cluster.update("a", "b")
        placer, one = cluster.router._placer, call("one")
        first, second = await cluster.choose(one)
        assert (placer.requests(first), placer.requests(second)) == (1, 0)
        cluster.router.on_request_routed(one, cluster.replicas[second].replica_id, None)
        assert (placer.requests(first), placer.requests(second)) == (0, 1)
        cluster.router.on_request_completed(cluster.replicas[second].replica_id, "one")
        assert placer.requests(second) == 0

    run(scenario)


def test_calls_that_do_not_generate_are_not_placed() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.add("a")
        cluster.update("a")
        metadata = RequestMetadata(request_id="report", internal_request_id="report")
        ranks = await cluster.router.choose_replicas(
            list(cluster.router.curr_replicas.values()), PendingRequest([], {}, metadata)
        )
        assert [len(rank) for rank in ranks] == [1]
        assert cluster.router._placer.requests("a") == 0

    run(scenario)


@pytest.mark.parametrize(
    ("avoid", "within_s", "declined"),
    [(("a",), 1000.0, False), (("a",), 1e-9, True), (("a", "b"), 1000.0, True)],
)
def test_a_request_that_has_a_replica_moves_only_where_that_gains_enough(
    avoid: tuple[str, ...], within_s: float, declined: bool
) -> None:
    async def scenario(cluster: Cluster) -> None:
        for name in ("a", "b"):
            await cluster.add(name)
        cluster.update("a", "b")
        await cluster.until(lambda: cluster.knows("a") and cluster.knows("b"))
        moving = call("one", avoid=avoid, within_s=within_s)
        candidates = list(cluster.router.curr_replicas.values())
        ranks = await cluster.router.choose_replicas(candidates, moving)
        assert moving.args[1].declined is declined
        booked = [cluster.router._placer.requests(name) for name in ("a", "b")]
        assert booked == ([0, 0] if declined else [0, 1])
        assert len(ranks[0]) == (2 if declined else 1)

    run(scenario)
