"""Reads the text of Triton's intermediate form into nested operations."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

VALUE = re.compile(r"%[\w$.-]+(?:@\d+)?(?:#\d+)?")
RESULTS = re.compile(r"^(%[\w$.-]+)(?::(\d+))? = (.*)$")
OPERATION = re.compile(r'^"?([a-z_]+\.[a-z_0-9.]+)"?')
LABELLED = re.compile(r"(%[\w$.-]+): ")
ASSIGNED = re.compile(r"(%[\w$.-]+) = ")
PARAMETER = re.compile(r"(%[\w$.-]+): (!tt\.ptr<\w+>|\w+)")
LOCATION = re.compile(r' loc\((?:#\w+|unknown|"[^"]*"(?:\(#\w+\))?)\)')


@dataclass(slots=True)
class Operation:
    name: str
    """Such as `arith.muli`; `block` for the label of a block, whose arguments are the results."""
    results: list[str]
    text: str
    """The line without the results."""
    regions: list[list[Operation]] = field(default_factory=list)

    @property
    def operands(self) -> list[str]:
        """Values in the order in which they are written."""
        return VALUE.findall(self.text)

    @property
    def type(self) -> str:
        """The result's: a loaded value's rather than the pointer's."""
        kind = re.split(r" -> | : | to ", self.text)[-1].removesuffix("{").strip()
        return re.sub(r"!tt\.ptr<(\w+)>", r"\1", kind) if self.name == "tt.load" else kind


@dataclass(slots=True)
class Function:
    parameters: dict[str, str]
    """Name with its `%` -> type."""
    body: list[Operation]


def parse(text: str) -> Function:
    """The first function of `text`. Every value gets a name of its own: as printed, regions beside
    one another use the same names again."""
    lines = [LOCATION.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    start = next(at for at, line in enumerate(lines) if line.startswith("tt.func"))
    parameters = dict(PARAMETER.findall(lines[start]))
    reader = _Reader(lines, start + 1)
    scope = {name: reader.unique(name) for name in parameters}
    return Function(parameters, reader.block(scope))


@dataclass(slots=True)
class _Reader:
    lines: list[str]
    at: int
    used: Counter[str] = field(default_factory=Counter)

    def unique(self, name: str) -> str:
        self.used[name] += 1
        return name if self.used[name] == 1 else f"{name}@{self.used[name]}"

    def take(self) -> str:
        self.at += 1
        return self.lines[self.at - 1]

    def block(self, scope: dict[str, str]) -> list[Operation]:
        """Operations up to the line that closes the block, which is left."""
        scope, found = dict(scope), []
        while not self.lines[self.at].startswith("}"):
            line = self.take()
            if line.startswith("^"):
                names = LABELLED.findall(line)
                scope |= {name: self.unique(name) for name in names}
                found.append(Operation("block", [scope[name] for name in names], line))
            else:
                found.append(self.operation(line, scope))
        return found

    def operation(self, line: str, scope: dict[str, str]) -> Operation:
        """With its regions; its results are added to the scope."""
        assigned = RESULTS.match(line)
        name, count, text = assigned.groups() if assigned else ("", None, line)
        inner = {argument: self.unique(argument) for argument in ASSIGNED.findall(text)}
        named = OPERATION.match(text)
        made = Operation(named[1] if named else "unknown", [], _renamed(text, scope | inner))
        while line.endswith("{"):
            made.regions.append(self.block(scope | inner))
            line = self.take()
        if made.regions and " : (" in line:  # the type of a generic form comes last
            made.text += line.removeprefix("})")
        if name:
            scope[name] = self.unique(name)
            parts = range(int(count)) if count else ()
            made.results = [f"{scope[name]}#{part}" for part in parts] or [scope[name]]
        return made


def _renamed(text: str, scope: dict[str, str]) -> str:
    def replace(found: re.Match[str]) -> str:
        name, part, number = found[0].partition("#")
        return scope.get(name, name) + part + number

    return VALUE.sub(replace, text)
