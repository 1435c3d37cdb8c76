"""The results as text: a line a section, then one table."""

from __future__ import annotations

from collections.abc import Iterator

from tests.gpu_check.records import Peer, Row
from tests.gpu_check.results import Results, SectionResult

_HEAD = ("item", "figure", "floor", "share", "target", "best peer", "ratio", "verdict")
_NOTHING = "-"


def render(results: Results) -> str:
    """The whole report."""
    return "\n".join([*_heading(results), "", *_table(results), "", *_closing(results)])


def line_of(section: SectionResult) -> str:
    """One line about a section that has ended."""
    detail = f": {section.detail.splitlines()[-1]}" if section.detail else ""
    failed = sum(row.passed is False for row in section.rows)
    counts = ((failed, "failed"), (len(section.missing), "missing"))
    bad = "".join(f"; {count} {what}" for count, what in counts if count)
    return f"{section.name}: {section.status} in {section.seconds:.1f} s{bad}{detail}"


def _heading(results: Results) -> Iterator[str]:
    if results.dry:
        yield "DRY: interpreter-sized shapes on a CPU; the timings mean nothing"
    for name, value in results.facts.items():
        yield f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}"


def _table(results: Results) -> Iterator[str]:
    rows = [list(_HEAD)]
    for section in results.sections:
        rows += [_cells(row, results) for row in section.rows]
        lost = f"FAIL: {section.name} {section.status}"
        rows += [[item, *[_NOTHING] * 6, lost] for item in section.missing]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    rows.insert(1, ["-" * width for width in widths])
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"| {' | '.join(cells)} |"


def _cells(row: Row, results: Results) -> list[str]:
    peer, ratio = best_peer(row, results.peers)
    return [
        row.item + (f" [{row.note}]" if row.note else ""),
        f"{_number(row.figure)} {row.unit}",
        _NOTHING if row.floor is None else _number(row.floor),
        _NOTHING if row.share is None else f"{row.share:.0%}",
        row.target or _NOTHING,
        peer,
        ratio,
        verdict(row, dry=results.dry),
    ]


def verdict(row: Row, *, dry: bool) -> str:
    if row.passed is None:
        return "dry" if dry and row.target else _NOTHING
    return "pass" if row.passed else "FAIL"


def best_peer(row: Row, peers: list[Peer]) -> tuple[str, str]:
    """(name and figure, how many times as good ours is) of the best one with a figure."""
    found = [
        (peer, peer.figure) for peer in peers if peer.item == row.item and peer.figure is not None
    ]
    if not found:
        return _NOTHING, _NOTHING
    choose = max if row.higher_is_better else min
    peer, figure = choose(found, key=lambda pair: pair[1])
    ours = row.figure if peer.beside is None else peer.beside
    ratio = ours / figure if row.higher_is_better else figure / ours
    return f"{peer.name} {_number(figure)}", f"{ratio:.2f}x"


def _closing(results: Results) -> Iterator[str]:
    yield "share: of the floor, which is what the measured ceilings allow; of rates, of the ceiling"
    yield "ratio: above 1 ours is better than the best peer, both timed in one process"
    yield from (
        f"{peer.name}, {peer.item}: {peer.problem}" for peer in results.peers if peer.problem
    )
    yield from (line_of(section) for section in results.sections if section.peer)
    bad = [row.item for s in results.sections for row in s.rows if row.passed is False]
    missing = [item for section in results.sections for item in section.missing]
    broken = [line_of(section) for section in results.sections if not section.fine]
    yield from (f"not fine: {line}" for line in broken)
    judged = sum(row.passed is not None for s in results.sections for row in s.rows)
    yield f"{judged} judged, {len(bad)} failed, {len(missing)} missing"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 and value == value else f"{value:.4g}"
