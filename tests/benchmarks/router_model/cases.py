"""Everything the simple model is asked, and its answers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from tests.benchmarks.router_model.model import Setup
from tests.benchmarks.router_model.ours import Ours
from tests.benchmarks.router_model.peers import peers
from tests.benchmarks.router_model.simulate import Outcome, simulate
from tests.benchmarks.router_model.workload import Hot, Workload, mooncake

OURS = "Quire prefix_aware"
COLD_AT_S = 1000.0
HOST_SHARE = 4.0
WORKLOADS = ("conversation x1", "conversation x1.75", "hot")


@dataclass(frozen=True, slots=True)
class Case:
    """A workload on a cluster."""

    workload: str
    host: bool = False
    """Whether replicas have host memory of four times their device."""
    cold: bool = False
    """Whether a replica is replaced by a cold one on the way."""

    @property
    def title(self) -> str:
        extra = (", host tier 4x" if self.host else "") + (", one replaced" if self.cold else "")
        return self.workload + extra


CASES = (
    *(Case(name) for name in WORKLOADS),
    Case("conversation x1.75", cold=True),
    *(Case(name, host=True) for name in WORKLOADS),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One policy in one case. Replays differ in when exactly requests come: a policy that goes
    by load comes to other caches then, and its hit rate to other tenths of a percent."""

    case: Case
    policy: str
    replay: int


@dataclass(frozen=True, slots=True)
class Source:
    """What the workloads are made of."""

    trace: Path
    max_requests: int | None = None

    def workload(self, name: str, replay: int) -> Workload:
        made = self._made(name, replay)
        return made if self.max_requests is None else made.first(self.max_requests)

    def _made(self, name: str, replay: int) -> Workload:
        if name == "hot":
            return Hot(seed=replay).make()
        trace, speed = name.split(" x")
        return _mooncake(self.trace, trace, replay).faster(float(speed))


@functools.lru_cache(maxsize=2)
def _mooncake(path: Path, name: str, seed: int) -> Workload:
    return mooncake(path, name, seed)


def policies() -> list[str]:
    """By name, ours last."""
    return [*peers(Setup()), OURS]


def runs(cases: Iterable[Case], names: Sequence[str], replays: int) -> list[Run]:
    """The device-only cases are replayed; the others show differences larger than chance."""
    return [
        Run(case, name, replay)
        for case, name in itertools.product(cases, names)
        for replay in range(1 if case.host or case.cold else replays)
    ]


def run_all(
    source: Source, wanted: Sequence[Run], workers: int, say: Callable[[str], None]
) -> dict[Run, Outcome]:
    """Some at a time, each in one process."""
    found: dict[Run, Outcome] = {}
    with ProcessPoolExecutor(workers) as pool:
        futures = {pool.submit(carry_out, source, run): run for run in wanted}
        for number, future in enumerate(as_completed(futures), start=1):
            run, outcome = futures[future], future.result()
            found[run] = outcome
            say(f"{number}/{len(wanted)} {run.case.title}: {run.policy}: {outcome.hit:.1f} %")
    return {run: found[run] for run in wanted}


def carry_out(source: Source, run: Run) -> Outcome:
    """One run."""
    setup = Setup(host_share=HOST_SHARE if run.case.host else 0.0)
    workload = source.workload(run.case.workload, run.replay)
    cold_at = None
    if run.case.cold:
        cold_at = min(COLD_AT_S, workload.requests[-1].at / 2)
    if run.policy == OURS:
        return simulate(Ours(setup, workload.mean_output_tokens), workload, setup, cold_at)
    return simulate(peers(setup)[run.policy](), workload, setup, cold_at)


def mean(outcomes: Iterable[Outcome]) -> Outcome:
    """Of replays."""
    columns = zip(*(outcome.row for outcome in outcomes), strict=True)
    return Outcome(*(fmean(column) for column in columns))


def by_case(found: dict[Run, Outcome]) -> Iterator[tuple[Case, dict[str, Outcome]]]:
    """Means over replays, by policy."""
    for case in dict.fromkeys(run.case for run in found):
        names = dict.fromkeys(run.policy for run in found if run.case == case)
        yield (
            case,
            {
                name: mean(o for run, o in found.items() if (run.case, run.policy) == (case, name))
                for name in names
            },
        )
