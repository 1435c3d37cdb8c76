"""The committed table of what each variant takes, by version of Triton."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tests.kernels.aot.compiling import Compiled, Target

PATH = Path(__file__).with_name("resources.json")
REGISTER_SLACK = 8
"""Registers a thread that a variant may take beyond the table."""
INSTRUCTION_SLACK = 0.05
"""Share of its instructions by which it may grow."""


class Row(NamedTuple):
    registers: int
    stack: int
    shared: int
    instructions: int

    @staticmethod
    def of(compiled: Compiled) -> Row:
        code = compiled.code
        assert code is not None, compiled.error
        return Row(code.registers, code.stack, compiled.shared, code.instructions)


Rows = dict[str, dict[str, Row]]
"""Identity of a variant -> target -> what it takes."""


def read(version: str, path: Path = PATH) -> Rows | None:
    """None where the table has nothing of that version of Triton."""
    tables = json.loads(path.read_text()) if path.exists() else {}
    if version not in tables:
        return None
    return {
        key: {target: Row(*numbers) for target, numbers in targets.items()}
        for key, targets in tables[version].items()
    }


def write(version: str, rows: Rows, path: Path = PATH) -> None:
    """Replace what the table has of that version, a variant a line."""
    tables = json.loads(path.read_text()) if path.exists() else {}
    tables[version] = rows
    parts = []
    for name in sorted(tables):
        lines = (f"{json.dumps(key)}: {json.dumps(tables[name][key])}" for key in tables[name])
        parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(sorted(lines)) + "\n}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def regressions(rows: Rows, key: str, target: Target, compiled: Compiled) -> list[str]:
    """Where it takes more than the table says, beyond the slack."""
    before = rows.get(key, {}).get(str(target))
    if before is None:
        return ["is not in the table: run `make check-kernels UPDATE=1`"]
    now = Row.of(compiled)
    most = before._replace(
        registers=before.registers + REGISTER_SLACK,
        instructions=int(before.instructions * (1 + INSTRUCTION_SLACK)),
    )
    return [
        f"{got:,} {name.replace('registers', 'registers a thread')}, {old:,} in the table"
        for name, got, old, limit in zip(Row._fields, now, before, most, strict=True)
        if got > limit
    ]
