"""What a section reports: one JSON line each, written the moment it is known."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Fact:
    """Something about the machine that rows are judged by or readers need."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the final table."""

    item: str
    figure: float
    unit: str
    floor: float | None = None
    """In the figure's unit: the least (times) or most (rates) that the machine allows; of errors
    the limit."""
    share: float | None = None
    """Of the floor that was reached: 1 is perfect. None where there is no such thing."""
    target: str = ""
    passed: bool | None = None
    """None where nothing is asked for, or where the figure means nothing."""
    higher_is_better: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """Somebody else's figure for a row's item, taken beside ours in the same process."""

    item: str
    name: str
    figure: float | None
    beside: float | None = None
    """Ours, in the peer's process and on the peer's tensors."""
    problem: str = ""
    """Why there is no figure."""


@dataclass(frozen=True, slots=True)
class End:
    """The last record of a section that came to its end by itself."""

    status: str
    detail: str = ""


Record = Fact | Row | Peer | End
_KINDS: dict[str, type[Record]] = {kind.__name__: kind for kind in (Fact, Row, Peer, End)}


class Recorder:
    """Appends records to a file; what was added survives the death of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_text("")

    def add(self, record: Record) -> None:
        with self._path.open("a") as file:
            file.write(to_json(record) + "\n")


def to_json(record: Record) -> str:
    return json.dumps({"kind": type(record).__name__, **asdict(record)})


def read(path: Path) -> list[Record]:
    """The whole lines of a Recorder's file; none where it was never made."""
    if not path.exists():
        return []
    found: list[Record] = []
    for line in path.read_text().splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue  # its writer was killed in the middle of the line
        found.append(_KINDS[fields.pop("kind")](**fields))
    return found
