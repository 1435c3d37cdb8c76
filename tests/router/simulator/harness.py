"""Small simulations: a tiny model on slow hardware, traces drawn from a seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from replicas.core.preemption.preempter import PreemptionMode
from replicas.core.scheduler import SchedulerConfig
from router.placement import Placer
from router.policies.policy import PlacementPolicy
from router.policies.prefix_aware import PrefixAware
from router.prefix_index import PrefixIndex
from router.simulator.hardware import Hardware
from router.simulator.machine import Machine
from router.simulator.measurements import Limits, Measurements, Report
from router.simulator.models import ModelShape
from router.simulator.replica import ReplicaSettings
from router.simulator.simulation import Simulation
from router.simulator.trace import Trace, TraceRequest

BLOCK = 4
TINY = ModelShape("tiny", 2, 8, 2, 1, 4, 16, 10, 100_000)
SLOW = Hardware("slow", 1e6, 1e9, 1e9, 1e9, 1.0, 1.0, 1.0, 0.001)
"""About 300 tokens a second, and a millisecond a step; copies are fast."""


def make_settings(
    num_blocks: int = 64, *, host_blocks: int = 0, **limits: object
) -> ReplicaSettings:
    options: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": 100_000,
        "preemption_mode": PreemptionMode.AUTO,
        "look_ahead": False,
    }
    return ReplicaSettings(
        machine=Machine(TINY, SLOW),
        scheduling=SchedulerConfig(**(options | limits)),  # type: ignore[arg-type]
        block_size=BLOCK,
        num_blocks=num_blocks,
        host_blocks=host_blocks,
        spill_tokens=BLOCK,
    )


def make_trace(requests: Sequence[tuple[float, Sequence[int], int]]) -> Trace:
    """From (arrival, full prompt blocks, output tokens)."""
    return Trace(
        tuple(TraceRequest(at, len(ids) * BLOCK, n, tuple(ids)) for at, ids, n in requests), BLOCK
    )


def families(
    seed: int, count: int, *, prefixes: int = 4, gap_s: float = 0.2, outputs: int = 12
) -> Trace:
    """Requests that share one of some prefixes of three blocks, each with a block of its own."""
    rng, at = random.Random(seed), 0.0
    requests = []
    for number in range(count):
        at += rng.expovariate(1 / gap_s)
        shared = 3 * rng.randrange(prefixes)
        ids = (shared, shared + 1, shared + 2, 3 * prefixes + number)
        length = 3 * BLOCK + rng.randint(1, BLOCK)
        requests.append(TraceRequest(at, length, rng.randint(1, outputs), ids))
    return Trace(tuple(requests), BLOCK)


def simulate(
    trace: Trace,
    settings: ReplicaSettings,
    policy: PlacementPolicy | None = None,
    *,
    num_replicas: int = 2,
    replicas_a_node: int = 1,
    feed_delay_s: float = 0.0,
) -> tuple[Simulation, Measurements]:
    """Run, and check all that holds of every run."""
    placer = Placer(policy or PrefixAware())
    simulation = Simulation(
        trace,
        settings,
        placer,
        num_replicas=num_replicas,
        replicas_a_node=replicas_a_node,
        feed_delay_s=feed_delay_s,
    )
    measured = simulation.run()
    assert measured.num_ended == len(trace.requests)
    assert len(measured.ttft_s) == len(measured.e2e_s) == sum(measured.placed)
    assert len(measured.gaps_s) == measured.output_tokens - len(measured.e2e_s)
    for index, replica in enumerate(simulation.replicas):
        assert replica.idle
        assert not replica.scheduler.requests
        assert replica.scheduler.kv.pool.num_used == 0
        replica.scheduler.check_integrity()
        assert placer.requests(f"replica-{index}") == 0
    check_index(placer.states.index, simulation)
    assert placer.states.gaps == 0
    assert placer.stale_placements == 0
    return simulation, measured


def check_index(index: PrefixIndex, simulation: Simulation) -> None:
    """The router knows exactly what the replicas hold."""
    device: Counter[bytes] = Counter()
    host: Counter[bytes] = Counter()
    for replica in simulation.replicas:
        kv = replica.scheduler.kv
        device.update(kv.pool.digests)
        host.update(kv.offloader.tier.digests if kv.offloader else ())
    listed = dict(index.walk())
    assert device == {d: m.device.bit_count() for d, m in listed.items() if m.device}
    assert host == {d: m.host.bit_count() for d, m in listed.items() if m.host}


def report(
    trace: Trace,
    settings: ReplicaSettings,
    policy: PlacementPolicy | None = None,
    *,
    num_replicas: int = 2,
    replicas_a_node: int = 1,
    feed_delay_s: float = 0.0,
) -> Report:
    _, measured = simulate(
        trace,
        settings,
        policy,
        num_replicas=num_replicas,
        replicas_a_node=replicas_a_node,
        feed_delay_s=feed_delay_s,
    )
    return measured.report(Limits(1.0, 0.1))
