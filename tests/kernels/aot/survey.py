"""What came of compiling many variants: faults, counts, and the table's rows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kernels.aot import rules, table
from tests.kernels.aot.compiling import Compiled, Target

if TYPE_CHECKING:
    from kernels.gpu.launch import Launch


@dataclass(frozen=True, slots=True)
class Finding:
    """One variant for one target."""

    op: str
    key: str
    target: Target
    compiled: Compiled
    faults: tuple[str, ...]


@dataclass(slots=True)
class Survey:
    rows: table.Rows | None
    """What sizes are compared to; None compares nothing."""
    findings: list[Finding] = field(default_factory=list)

    def take(self, launch: Launch, target: Target, compiled: Compiled) -> Finding:
        from kernels.variants import identity

        key = identity(launch)
        found = rules.faults(key, target, compiled)
        if self.rows is not None and compiled.code is not None:
            found += table.regressions(self.rows, key, target, compiled)
        finding = Finding(launch.op, key, target, compiled, tuple(found))
        self.findings.append(finding)
        return finding

    @property
    def counts(self) -> Counter[str]:
        """Compilations a target."""
        return Counter(str(finding.target) for finding in self.findings)

    @property
    def broken(self) -> int:
        return sum(bool(finding.faults) for finding in self.findings)

    def merged(self, before: table.Rows, listed: set[tuple[str, int]]) -> table.Rows:
        """`before` with what was compiled now, without what is no longer `listed`: identities with
        an architecture."""
        rows: table.Rows = {}
        for key, arch in listed:
            for target in (str(Target(arch)), str(Target(arch, aligned=False))):
                if target in before.get(key, {}):
                    rows.setdefault(key, {})[target] = before[key][target]
        for finding in self.findings:
            if finding.compiled.code is not None:
                row = table.Row.of(finding.compiled)
                rows.setdefault(finding.key, {})[str(finding.target)] = row
        return rows

    def write(self, path: Path) -> None:
        """As JSON: a list of objects."""
        report = [
            {
                "op": finding.op,
                "key": finding.key,
                "arch": finding.target.arch,
                "aligned": finding.target.aligned,
                "faults": finding.faults,
                "compiled": finding.compiled.as_json(),
            }
            for finding in self.findings
        ]
        path.write_text(json.dumps(report))


def read_report(path: Path) -> list[Finding]:
    """What `Survey.write` wrote."""
    return [
        Finding(
            item["op"],
            item["key"],
            Target(item["arch"], item["aligned"]),
            Compiled.of_json(item["compiled"]),
            tuple(item["faults"]),
        )
        for item in json.loads(path.read_text())
    ]
