"""What a simulation measures, and the report made of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from replicas.core.scheduler_output import StepOutcome
from replicas.core.scheduler_stats import SchedulerStats
from router.simulator.replica import SimulatedReplica


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of times in seconds; 0 where there was none."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: array[float]) -> Percentiles:
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0)
        times = np.frombuffer(values)
        return cls(float(times.mean()), *map(float, np.percentile(times, (50, 90, 99))))


@dataclass(frozen=True, slots=True)
class Limits:
    """What a good request stays within, in seconds."""

    ttft_s: float
    itl_s: float
    """Of the mean gap between its tokens."""


class Measurements:
    """Times of all requests and counters of all replicas."""

    def __init__(self, num_replicas: int, start_s: float) -> None:
        """`start_s` is when the first request arrives."""
        self.placed = [0] * num_replicas
        """Requests a replica."""
        self.refused = 0
        self.steps = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.start_s = start_s
        self.last_end_s = start_s
        self.stats: list[SchedulerStats] = []
        self.ttft_s = array("d")
        self.e2e_s = array("d")
        self.mean_gap_s = array("d")
        """Of each request; 0 for one of a single token."""
        self.gaps_s = array("d")

    @property
    def num_ended(self) -> int:
        """Requests that ended or were refused."""
        return len(self.e2e_s) + self.refused

    def note_placed(self, replica: int) -> None:
        """A replica was chosen for a request, and took it."""
        self.placed[replica] += 1

    def note_refused(self) -> None:
        """The chosen replica can never serve the request."""
        self.refused += 1

    def note_step(self, outcome: StepOutcome) -> None:
        """A step ended."""
        self.steps += 1
        self.gaps_s.extend(outcome.inter_token_s)

    def note_finished(self, outcome: StepOutcome, now: float) -> None:
        """Requests ended with the step."""
        self.last_end_s = now
        for each in outcome.finished:
            self.prompt_tokens += each.num_prompt_tokens
            self.output_tokens += each.num_output_tokens
            self.ttft_s.append(each.queue_s + each.prefill_s)
            self.e2e_s.append(each.e2e_s)
            self.mean_gap_s.append(each.decode_s / max(1, each.num_output_tokens - 1))

    def close(self, replicas: Sequence[SimulatedReplica]) -> Measurements:
        """All has been served: take the replicas' counters."""
        self.stats = [replica.scheduler.stats for replica in replicas]
        return self

    def total(self, counter: str) -> int:
        """A counter of `SchedulerStats`, summed over the replicas."""
        return sum(getattr(stats, counter) for stats in self.stats)

    def report(self, limits: Limits) -> Report:
        """What came of it."""
        served = len(self.e2e_s)
        simulated_s = self.last_end_s - self.start_s
        looked_up = self.total("prefix_cache_queries")
        swaps = self.total("swaps")
        good = (
            np.count_nonzero(
                (np.frombuffer(self.ttft_s) <= limits.ttft_s)
                & (np.frombuffer(self.mean_gap_s) <= limits.itl_s)
            )
            if served
            else 0
        )
        return Report(
            requests=served,
            refused=self.refused,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            simulated_s=simulated_s,
            device_hit_rate=_share(self.total("prefix_cache_hits"), looked_up),
            host_hit_rate=_share(self.total("host_cache_hits"), looked_up),
            ttft_s=Percentiles.of(self.ttft_s),
            itl_s=Percentiles.of(self.gaps_s),
            e2e_s=Percentiles.of(self.e2e_s),
            imbalance=max(self.placed) * len(self.placed) / max(1, sum(self.placed)),
            preemptions_recompute=self.total("preemptions") - swaps,
            preemptions_swap=swaps,
            recomputed_tokens=self.total("recomputed_tokens"),
            restored_tokens=self.total("restored_tokens"),
            goodput_rps=_share(int(good), simulated_s),
            good_share=_share(int(good), served),
            output_tokens_per_s=_share(self.output_tokens, simulated_s),
            steps=self.steps,
        )


@dataclass(frozen=True, slots=True)
class Report:
    """One policy's results."""

    requests: int
    """Served to their end."""
    refused: int
    """That no replica can ever serve: longer than its context or its KV pool."""
    prompt_tokens: int
    output_tokens: int
    simulated_s: float
    """From the first arrival to the last end."""
    device_hit_rate: float
    """Prompt tokens found on the device at first admission, of all looked up."""
    host_hit_rate: float
    """The same for the host tier, of all looked up."""
    ttft_s: Percentiles
    """Arrival to first token."""
    itl_s: Percentiles
    """Each gap between two tokens of a request."""
    e2e_s: Percentiles
    imbalance: float
    """Requests of the replica with the most, over the mean."""
    preemptions_recompute: int
    preemptions_swap: int
    recomputed_tokens: int
    restored_tokens: int
    goodput_rps: float
    """Requests within the limits, a simulated second."""
    good_share: float
    output_tokens_per_s: float
    steps: int
    """Of all replicas."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: percentiles as objects of their own."""
        return asdict(self)


def _share(part: int, whole: float) -> float:
    return part / whole if whole else 0.0
