"""Finds index arithmetic that can leave 31 bits before it reaches a pointer.

Runs a kernel's intermediate form on intervals: from bounds of the scalar arguments, of the grid
and of the integers that pointers lead to, to every 32-bit sum and product of an address.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import prod

from tests.kernels.aot.intervals import (
    BINARY,
    Interval,
    add,
    bits_of,
    multiply,
    of_bits,
)
from tests.kernels.aot.ttir import Function, Operation, parse

ROUNDS = 3
"""Passes over a loop's body before what still grows is bounded otherwise."""
ANYTHING = of_bits(64)
PASSED_ON = {
    "tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "tt.unsplat",
    "arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast", "tt.addptr", "tt.bitcast",
}  # fmt: skip
"""Whose result is bounded as their first operand is, as far as its type allows."""
LOADS = frozenset({"tt.load", "tt.atomic_rmw", "tt.atomic_cas"})
LOOP = re.compile(r"scf\.for (\S+) = (\S+) to (\S+) step (\S+)")
CARRIED = re.compile(r"(%[\w$.@-]+) = (%[\w$.@-]+(?:#\d+)?)")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What can be counted on at run time."""

    scalars: Mapping[str, Interval]
    """Argument -> its values."""
    loads: Mapping[str, Interval]
    """Pointer argument -> values of the integers that it leads to."""
    grid: tuple[int, int, int]
    """The most programs along each axis."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """An operation on 32 bits or fewer whose exact result need not fit."""

    operation: str
    bounds: Interval

    def __str__(self) -> str:
        return f"{self.operation} reaches {self.bounds.low:,} .. {self.bounds.high:,}"


def overflows(ttir: str, bounds: Bounds) -> list[Overflow]:
    """Those that a pointer's offset depends on."""
    function = parse(ttir)
    run = _Run(function, bounds)
    run.block(function.body)
    return [run.found[name] for name in sorted(run.found) if name in run.addresses()]


@dataclass(slots=True)
class _Run:
    function: Function
    bounds: Bounds
    values: dict[str, Interval] = field(default_factory=dict)
    roots: dict[str, frozenset[str]] = field(default_factory=dict)
    """Pointer -> the arguments that it may come from."""
    sources: dict[str, set[str]] = field(default_factory=dict)
    """Value -> what it is computed from, other than through memory."""
    offsets: set[str] = field(default_factory=set)
    found: dict[str, Overflow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in self.function.parameters.items():
            bare = name.removeprefix("%")
            if kind.startswith("!tt.ptr"):
                self.roots[name] = frozenset((bare,))
            elif (bits := bits_of(kind)) is not None:
                self.values[name] = self.bounds.scalars.get(bare, of_bits(bits))

    def addresses(self) -> set[str]:
        """All values that an offset depends on."""
        seen: set[str] = set()
        waiting = list(self.offsets)
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting.extend(self.sources.get(name, ()))
        return seen

    def block(self, operations: list[Operation]) -> list[str]:
        """Run them; what the last one hands out."""
        handed: list[str] = []
        for operation in operations:
            if operation.name == "scf.for":
                self._for(operation)
            elif operation.name == "scf.if":
                self._if(operation)
            elif operation.name == "scf.while":
                self._while(operation)
            elif operation.name in ("scf.yield", "scf.condition"):
                handed = operation.operands
            else:
                self._plain(operation)
        return handed

    def _plain(self, operation: Operation) -> None:
        operands = operation.operands
        if operation.name == "tt.addptr":
            self.offsets.add(operands[1])
        for result in operation.results:
            self._set_roots(result, operands)
            self.sources.setdefault(result, set()).update(_followed(operation))
            bits = bits_of(operation.type)
            if bits is not None:
                self._bound(result, operation, bits)

    def _set_roots(self, result: str, operands: list[str]) -> None:
        known = [self.roots[name] for name in operands if name in self.roots]
        if known:
            self.roots[result] = frozenset().union(*known)

    def _bound(self, result: str, operation: Operation, bits: int) -> None:
        exact, room = self._exact(operation, bits), of_bits(bits)
        self.found.pop(result, None)
        computed = operation.name in BINARY or operation.name == "arith.trunci"
        if computed and 1 < bits <= 32 and not exact.within(room):
            self.found[result] = Overflow(f"{result} = {operation.text}", exact)
        self.values[result] = exact.cut_to(room)

    def _exact(self, operation: Operation, bits: int) -> Interval:
        """Before it is cut to the type."""
        name, room = operation.name, of_bits(bits)
        known = [self._value(operand, room) for operand in operation.operands]
        if name in BINARY:
            return BINARY[name](known[0], known[1])
        if name in PASSED_ON:
            return known[0]
        if name == "arith.select":
            return known[1].join(known[2])
        if name in LOADS:
            return self._loaded(operation, room)
        if name in ("tt.reduce", "tt.scan"):
            return _gathered(operation, known[0])
        return self._made(operation, room)

    def _made(self, operation: Operation, room: Interval) -> Interval:
        """Of operations without operands."""
        text = operation.text
        if operation.name == "arith.constant":
            numbers = [int(number) for number in re.findall(r"-?\b\d+\b", text.split(" : ")[0])]
            return Interval(min(numbers), max(numbers)) if numbers else room
        if operation.name == "tt.make_range":
            end, start = (int(re.search(rf"{key} = (\d+)", text)[1]) for key in ("end", "start"))
            return Interval(start, end - 1)
        if operation.name == "tt.get_program_id":
            return Interval(0, self._most_programs(text) - 1)
        if operation.name == "tt.get_num_programs":
            return Interval(1, self._most_programs(text))
        return room

    def _most_programs(self, text: str) -> int:
        return self.bounds.grid["xyz".index(text.split()[1])]

    def _loaded(self, operation: Operation, room: Interval) -> Interval:
        """By the argument that the pointer comes from; where masked, or what stands in."""
        pointer, *others = operation.operands
        found = [self.bounds.loads.get(root, room) for root in self.roots.get(pointer, ())]
        if operation.name == "tt.load":
            found += [self._value(other, room) for other in others[1:]]
        return reduce(Interval.join, found) if found else room

    def _value(self, name: str, room: Interval) -> Interval:
        return self.values.get(name, room)

    def _if(self, operation: Operation) -> None:
        branches = [self.block(region) for region in operation.regions]
        for at, result in enumerate(operation.results):
            self._hand(result, [branch[at] for branch in branches])

    def _for(self, operation: Operation) -> None:
        induction, first, end, step = LOOP.match(operation.text).groups()
        room = of_bits(bits_of(operation.type) or 64)
        low, high = self._value(first, room), self._value(end, room)
        self.values[induction] = Interval(low.low, max(low.low, high.high - 1))
        self.sources.setdefault(induction, set()).update((first, end, step))
        least_step = max(1, self._value(step, Interval(1, 1)).low)
        trips = max(0, -(-(high.high - low.low) // least_step))
        carried = CARRIED.findall(operation.text.partition("iter_args(")[2])
        yielded = self._settle(lambda: self.block(operation.regions[0]), carried, trips)
        for result, (_, start), last in zip(operation.results, carried, yielded, strict=True):
            self._hand(result, [start, last])

    def _while(self, operation: Operation) -> None:
        carried = CARRIED.findall(operation.text)
        before, after = operation.regions
        names = [name for label in after if label.name == "block" for name in label.results]

        def once() -> list[str]:
            for name, value in zip(names, self.block(before)[1:], strict=True):
                self._hand(name, [value])
            return self.block(after)

        self._settle(once, carried, None)
        for result, value in zip(operation.results, self.block(before)[1:], strict=True):
            self._hand(result, [value])

    def _settle(
        self, once: Callable[[], list[str]], carried: list[tuple[str, str]], trips: int | None
    ) -> list[str]:
        """Run a loop's body until the carried values' bounds hold for all rounds, of which there
        are `trips` at the most."""
        for name, start in carried:
            self._hand(name, [start])
        for _ in range(ROUNDS):
            before = self._bounds_of(carried)
            yielded = self._round(once, carried)
            after = self._bounds_of(carried)
            if before == after:
                return yielded
        growing = {name for name in before if name in after and before[name] != after[name]}
        growth = {name: moved(before[name], after[name]) for name in growing}
        rounds = Interval(trips or 0, trips or 0)
        widened = {name: add(after[name], multiply(growth[name], rounds)) for name in growing}
        self.values.update(widened)
        self._round(once, carried)
        for name in growing:
            if trips is None or not self.values[name].within(add(widened[name], growth[name])):
                self.values[name] = ANYTHING  # in the end, as it grows by more each time
        return self._round(once, carried)

    def _round(self, once: Callable[[], list[str]], carried: list[tuple[str, str]]) -> list[str]:
        held = self._bounds_of(carried)
        yielded = once()
        for (name, start), end in zip(carried, yielded, strict=True):
            self._hand(name, [start, end])
            if name in held and name in self.values:
                self.values[name] = self.values[name].join(held[name])
        return yielded

    def _bounds_of(self, carried: list[tuple[str, str]]) -> dict[str, Interval]:
        return {name: self.values[name] for name, _ in carried if name in self.values}

    def _hand(self, name: str, values: list[str]) -> None:
        """`name` is one of `values`."""
        self.sources.setdefault(name, set()).update(values)
        self._set_roots(name, values)
        known = [self.values[value] for value in values if value in self.values]
        if len(known) == len(values):
            self.values[name] = reduce(Interval.join, known)
        else:
            self.values.pop(name, None)


def moved(before: Interval, after: Interval) -> Interval:
    """How far each end has gone."""
    return Interval(after.low - before.low, after.high - before.high)


def _followed(operation: Operation) -> list[str]:
    """The operands that the result is computed from: not what was loaded through a pointer, nor
    what only decides."""
    decides = operation.name.startswith("arith.cmp")
    return [] if decides or operation.name in LOADS else operation.operands


def _gathered(operation: Operation, each: Interval) -> Interval:
    """Of a reduction or scan: a sum of all, or one of them."""
    if all(step.name != "arith.addi" for step in operation.regions[0]):
        return each
    shape = re.findall(r"(\d+)x", operation.text.rpartition(" : (")[2].partition(">")[0])
    return multiply(each, Interval(0, prod(map(int, shape)))).join(each)
