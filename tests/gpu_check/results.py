"""The results of a whole run, and the file they are kept in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu_check.records import Fact, Peer, Record, Row, to_json

OK = "ok"
NOT_AVAILABLE = "not available"
"""What a section needs is not installed."""


@dataclass(frozen=True, slots=True)
class SectionResult:
    name: str
    status: str
    """`ok`, `failed`, `overran`, `crashed`, `not available` or `no time left`."""
    seconds: float
    detail: str
    records: tuple[Record, ...]
    expected: tuple[str, ...] = ()
    """Items of which each must have a row."""
    peer: bool = False

    @property
    def rows(self) -> list[Row]:
        return [record for record in self.records if isinstance(record, Row)]

    @property
    def missing(self) -> list[str]:
        """Expected items without a row."""
        present = {row.item for row in self.rows}
        return [item for item in self.expected if item not in present]

    @property
    def fine(self) -> bool:
        """Whether nothing of ours is wrong."""
        if self.peer:
            return True
        clean = self.status == OK and not self.missing
        return clean and all(row.passed is not False for row in self.rows)


@dataclass(slots=True)
class Results:
    dry: bool
    sections: list[SectionResult] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        return {record.name: record.value for record in self._all() if isinstance(record, Fact)}

    @property
    def peers(self) -> list[Peer]:
        return [record for record in self._all() if isinstance(record, Peer)]

    @property
    def fine(self) -> bool:
        return all(section.fine for section in self.sections)

    def write(self, path: Path) -> None:
        """Replace the file as a whole: a reader, or what is left after a crash, sees no half."""
        content = {
            "dry": self.dry,
            "fine": self.fine,
            "sections": [
                {
                    "name": section.name,
                    "status": section.status,
                    "seconds": round(section.seconds, 2),
                    "detail": section.detail,
                    "missing": section.missing,
                    "records": [json.loads(to_json(record)) for record in section.records],
                }
                for section in self.sections
            ],
        }
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(content, indent=1))
        fresh.replace(path)

    def _all(self) -> Iterator[Record]:
        for section in self.sections:
            yield from section.records
