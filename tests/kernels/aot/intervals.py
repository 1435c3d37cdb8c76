"""Bounds of integers, as interval arithmetic gives them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple


class Interval(NamedTuple):
    """All whole numbers from `low` to `high`, both included."""

    low: int
    high: int

    def join(self, other: Interval) -> Interval:
        return Interval(min(self.low, other.low), max(self.high, other.high))

    def cut_to(self, room: Interval) -> Interval:
        """What of it is in `room`; the nearest number where nothing is."""
        low, high = (min(max(end, room.low), room.high) for end in self)
        return Interval(low, high)

    def within(self, other: Interval) -> bool:
        return other.low <= self.low and self.high <= other.high


def of_bits(bits: int) -> Interval:
    """What a signed integer can hold. One bit is a truth value: 0 or 1."""
    return Interval(0, 1) if bits == 1 else Interval(-(1 << bits - 1), (1 << bits - 1) - 1)


def bits_of(kind: str) -> int | None:
    """Of an integer type or a tensor of it: 32 for `tensor<64x1xi32>`; None for other types."""
    found = re.search(r"(?:^|x)(?:i(\d+)|index)>?$", kind)
    return None if found is None else int(found[1] or 64)


def add(a: Interval, b: Interval) -> Interval:
    return Interval(a.low + b.low, a.high + b.high)


def subtract(a: Interval, b: Interval) -> Interval:
    return Interval(a.low - b.high, a.high - b.low)


def multiply(a: Interval, b: Interval) -> Interval:
    corners = [x * y for x in a for y in b]
    return Interval(min(corners), max(corners))


def divide(a: Interval, b: Interval) -> Interval:
    """Rounded towards zero."""
    if b.low <= 0:
        reach = max(map(abs, a))
        return Interval(-reach, reach)
    corners = [abs(x) // y * (1 if x >= 0 else -1) for x in a for y in b]
    return Interval(min(corners), max(corners))


def remainder(a: Interval, b: Interval) -> Interval:
    """With the sign of `a`."""
    reach = max(map(abs, b)) - 1
    return Interval(max(min(a.low, 0), -reach), min(max(a.high, 0), reach))


def shift_left(a: Interval, b: Interval) -> Interval:
    bounded = Interval(max(b.low, 0), min(max(b.high, 0), 64))
    return multiply(a, Interval(1 << bounded.low, 1 << bounded.high))


def shift_right(a: Interval, b: Interval) -> Interval:
    corners = [x >> min(max(y, 0), 64) for x in a for y in b]
    return Interval(min(corners), max(corners))


def bitwise_and(a: Interval, b: Interval) -> Interval:
    highs = [x.high for x in (a, b) if x.low >= 0]
    return Interval(0, min(highs)) if highs else _bitwise(a, b)


def _bitwise(a: Interval, b: Interval) -> Interval:
    """Of `or` and `xor`: no more bits than either has."""
    low = 0 if a.low >= 0 <= b.low else -(1 << max(abs(x).bit_length() for x in (*a, *b)))
    return Interval(low, (1 << max(abs(x).bit_length() for x in (*a, *b))) - 1)


def least(a: Interval, b: Interval) -> Interval:
    return Interval(min(a.low, b.low), min(a.high, b.high))


def greatest(a: Interval, b: Interval) -> Interval:
    return Interval(max(a.low, b.low), max(a.high, b.high))


BINARY: dict[str, Callable[[Interval, Interval], Interval]] = {
    "arith.addi": add,
    "arith.subi": subtract,
    "arith.muli": multiply,
    "arith.divsi": divide,
    "arith.remsi": remainder,
    "arith.shli": shift_left,
    "arith.shrsi": shift_right,
    "arith.andi": bitwise_and,
    "arith.ori": _bitwise,
    "arith.xori": _bitwise,
    "arith.minsi": least,
    "arith.maxsi": greatest,
}
"""Triton's operations on two integers; what may leave the type does so here."""
