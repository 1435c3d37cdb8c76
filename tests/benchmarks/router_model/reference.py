"""What the model is known to give, and what placement has to reach in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.benchmarks.router_model.cases import OURS, Case
from tests.benchmarks.router_model.simulate import Outcome

HIT_TOLERANCE = 0.3
"""Points of the hit rate: what two programs of the same model may differ by."""

Reference = tuple[float, float, float | None, float]
"""Hit %, mean TTFT, p99 TTFT, imbalance."""

_X1: dict[str, Reference] = {
    "round robin": (5.6, 1.93, 11.9, 1.00),
    "power of two": (5.6, 2.17, 12.2, 1.02),
    "SGLang smallest-tree": (13.9, 1.64, 10.9, 2.47),
    "Ray PrefixAffinity": (13.8, 1.64, 10.7, 1.05),
    "Dynamo + predict": (9.5, 1.35, 8.5, 1.06),
    "llm-d 3:2:2": (13.4, 1.25, 9.4, 1.11),
    "LMetric": (12.6, 1.14, 9.2, 1.03),
    "Preble E2": (13.2, 1.12, 8.5, 1.04),
    OURS: (13.5, 1.09, 8.3, 1.03),
}
_X175: dict[str, Reference] = {
    "round robin": (5.6, 7.07, 38.9, 1.00),
    "power of two": (5.6, 5.0, 20.0, 1.02),
    "SGLang smallest-tree": (13.7, 3.24, 17.8, 2.47),
    "Ray PrefixAffinity": (13.8, 3.11, 15.4, 1.05),
    "Dynamo + predict": (9.3, 2.51, 10.0, 1.06),
    "llm-d 3:2:2": (13.1, 2.15, 12.7, 1.11),
    "LMetric": (11.7, 1.70, 12.5, 1.03),
    "Preble E2": (13.2, 1.48, 8.8, 1.04),
    OURS: (13.5, 1.46, 8.5, 1.03),
}
_HOT: dict[str, Reference] = {
    "round robin": (88.5, 0.86, None, 1.00),
    "power of two": (88.4, 0.96, None, 1.02),
    "SGLang smallest-tree": (90.8, 0.47, None, 1.88),
    "Ray PrefixAffinity": (93.9, 0.17, None, 2.83),
    "Dynamo + predict": (93.7, 0.15, None, 1.23),
    "llm-d 3:2:2": (93.9, 0.14, None, 1.87),
    "LMetric": (93.8, 0.134, None, 1.12),
    "Preble E2": (93.9, 0.17, None, 2.83),
    OURS: (93.9, 0.130, None, 1.04),
}
REFERENCES: dict[Case, dict[str, Reference]] = {
    Case("conversation x1"): _X1,
    Case("conversation x1.75"): _X175,
    Case("hot"): _HOT,
}


@dataclass(frozen=True, slots=True)
class Target:
    """Something ours has to reach."""

    what: str
    measured: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        if self.at_least:
            return self.measured >= self.bound
        return self.measured <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.met else f"MISSED by {abs(self.measured - self.bound):.3f}"
        return f"{self.what}: {self.measured:.3f}, target {sign} {self.bound:.3f}: {verdict}"


def targets(found: Mapping[Case, Mapping[str, Outcome]]) -> Iterator[Target]:
    """Those that can be judged by what was run."""
    busy, cold = found.get(Case("conversation x1.75"), {}), Case("conversation x1.75", cold=True)
    if OURS in busy:
        ours = busy[OURS]
        rivals = [outcome.ttft_mean_s for name, outcome in busy.items() if name != OURS]
        yield Target("conversation x1.75, hit %", ours.hit, 13.4, at_least=True)
        yield Target("conversation x1.75, imbalance", ours.imbalance, 1.06)
        if rivals:
            best = min(rivals)
            yield Target("conversation x1.75, mean TTFT s, best rival", ours.ttft_mean_s, best)
    if OURS in busy and OURS in found.get(cold, {}):
        rise = found[cold][OURS].ttft_p99_s / busy[OURS].ttft_p99_s
        yield Target("one replica replaced, p99 TTFT over the undisturbed", rise, 1.10)
    hot = found.get(Case("hot"), {})
    if OURS in hot:
        yield Target("hot, imbalance", hot[OURS].imbalance, 1.1)
    for name in ("conversation x1", "conversation x1.75"):
        hosted = found.get(Case(name, host=True), {})
        if OURS in hosted:
            yield Target(f"{name}, host tier 4x, hit %", hosted[OURS].hit, 25.0, at_least=True)
