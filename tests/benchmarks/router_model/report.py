"""The tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from tests.benchmarks.router_model.cases import Case, Run, by_case
from tests.benchmarks.router_model.reference import (
    HIT_TOLERANCE,
    REFERENCES,
    Reference,
    targets,
)
from tests.benchmarks.router_model.simulate import Outcome

_COLUMNS = ("policy", "hit %", "of it host", "imbalance", "TTFT mean s", "p99 s")
_BESIDE = ("reference: hit/imbalance/mean/p99", "hit within 0.3")


def render(found: dict[Run, Outcome], *, judge: bool) -> str:
    """Markdown: a table a case, then (if the figures mean anything) the targets."""
    parts = [_table(case, outcomes, judge=judge) for case, outcomes in by_case(found)]
    if judge:
        judged = "\n".join(f"- {target}" for target in targets(dict(by_case(found))))
        parts.append(f"### Targets\n\n{judged}")
    return "\n\n".join(parts)


def to_json(found: dict[Run, Outcome]) -> dict[str, Any]:
    """Every run, and the targets."""
    return {
        "runs": [
            {
                "case": run.case.title,
                "policy": run.policy,
                "replay": run.replay,
                **asdict(outcome),
            }
            for run, outcome in found.items()
        ],
        "targets": [{**asdict(t), "met": t.met} for t in targets(dict(by_case(found)))],
    }


def _table(case: Case, outcomes: Mapping[str, Outcome], *, judge: bool) -> str:
    references = REFERENCES.get(case, {}) if judge else {}
    columns = _COLUMNS + (_BESIDE if references else ())
    lines = [f"### {case.title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, outcome in outcomes.items():
        cells = [name, *_cells(outcome)]
        if references:
            cells += _beside(outcome, references[name])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(outcome: Outcome) -> Iterator[str]:
    yield f"{outcome.hit:.2f}"
    yield f"{outcome.host_hit:.1f}"
    yield f"{outcome.imbalance:.2f}"
    yield f"{outcome.ttft_mean_s:.3f}"
    yield f"{outcome.ttft_p99_s:.2f}"


def _beside(outcome: Outcome, reference: Reference) -> Iterator[str]:
    hit, ttft, p99, imbalance = reference
    yield f"{hit}/{imbalance:.2f}/{ttft}/{'' if p99 is None else p99}"
    off = outcome.hit - hit
    yield "yes" if abs(round(off, 2)) <= HIT_TOLERANCE else f"no: {off:+.2f}"
