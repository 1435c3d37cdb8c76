"""One policy, one workload, one cluster: placed request by request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.benchmarks.router_model.model import Replica, Setup
from tests.benchmarks.router_model.ours import FEED_PERIOD_S, Ours
from tests.benchmarks.router_model.peers import Policy
from tests.benchmarks.router_model.workload import Workload


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it."""

    hit: float
    """Share of all prompt tokens found in a cache, in %."""
    host_hit: float
    """The part of it that was found in host memory."""
    ttft_mean_s: float
    ttft_p99_s: float
    imbalance: float
    """Requests of the replica with the most, over the mean."""

    @property
    def row(self) -> tuple[float, ...]:
        """In the order of the fields."""
        return (self.hit, self.host_hit, self.ttft_mean_s, self.ttft_p99_s, self.imbalance)


def simulate(
    policy: Policy, workload: Workload, setup: Setup, cold_at: float | None = None
) -> Outcome:
    """At `cold_at` seconds an empty replica takes the place of the first."""
    node_host = Counter[int]()
    replicas = [Replica(f"r{number}", setup, node_host) for number in range(setup.replicas)]
    ttfts, device, host, next_tick = [], 0, 0, 0.0
    for request in workload.requests:
        if isinstance(policy, Ours):
            while next_tick <= request.at:
                for replica in replicas:
                    replica.advance(next_tick)
                policy.tick(next_tick)
                next_tick += FEED_PERIOD_S
        for replica in replicas:
            replica.advance(request.at)
        if cold_at is not None and request.at >= cold_at:
            cold_at = None
            new = Replica("new", setup, node_host)
            new.advance(request.at)
            replicas[0].cache.leave()
            policy.replaced(replicas[0], new)
            replicas[0] = new
        chosen = policy.choose(request, replicas)
        job, on_device, on_host = chosen.place(request)
        ttfts.append(job.first_token_at - request.at)
        device, host = device + on_device, host + on_host
    ttfts.sort()
    placed = [replica.placed for replica in replicas]
    tokens = workload.prompt_tokens
    return Outcome(
        hit=100 * (device + host) / tokens,
        host_hit=100 * host / tokens,
        ttft_mean_s=sum(ttfts) / len(ttfts),
        ttft_p99_s=ttfts[int(0.99 * len(ttfts))],
        imbalance=max(placed) / (sum(placed) / len(placed)),
    )
