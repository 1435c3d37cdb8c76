"""What is asked of a figure, and whether it is reached."""

from __future__ import annotations

from dataclasses import dataclass

from tests.gpu_check.records import Row


@dataclass(frozen=True, slots=True)
class Target:
    """At least a share of the floor, or at most a figure; neither asks for nothing."""

    share: float | None = None
    at_most: float | None = None
    stretch: float | None = None
    """A share that would be even better; never judged."""

    def text(self, unit: str) -> str:
        if self.share is not None:
            more = f" ({self.stretch:.0%})" if self.stretch is not None else ""
            return f">= {self.share:.0%}{more}"
        if self.at_most is not None:
            return f"<= {self.at_most:g} {unit}".rstrip()
        return ""

    def reached(self, figure: float, share: float | None) -> bool | None:
        if self.share is not None:
            return share is not None and share >= self.share
        if self.at_most is not None:
            return figure <= self.at_most
        return None


NOTHING = Target()


def timed(
    item: str, seconds: float, floor_s: float | None, target: Target, *, dry: bool, note: str = ""
) -> Row:
    """A row of microseconds. In a dry run it is not judged."""
    share = None if floor_s is None else floor_s / seconds
    figure = seconds * 1e6
    return Row(
        item,
        figure,
        "us",
        None if floor_s is None else floor_s * 1e6,
        share,
        target.text("us"),
        None if dry else target.reached(figure, share),
        note=note,
    )


def rate(
    item: str,
    figure: float,
    unit: str,
    ceiling: float | None,
    target: Target,
    *,
    dry: bool,
    note: str = "",
) -> Row:
    """A row of something a second, the more the better. In a dry run it is not judged."""
    share = None if ceiling is None else figure / ceiling
    passed = None if dry else target.reached(figure, share)
    text = target.text(unit)
    return Row(item, figure, unit, ceiling, share, text, passed, higher_is_better=True, note=note)


def checked(
    item: str,
    error: float,
    limit: float,
    *,
    unit: str = "rel. error",
    passed: bool | None = None,
    note: str,
) -> Row:
    """A row of an error that must be below a limit, in a dry run as well. `passed` adds what else
    was asked for."""
    below = error < limit  # false of NaN
    ok = below if passed is None else below and passed
    return Row(item, error, unit, limit, None, f"< {limit:g}", ok, note=note)


def exact(item: str, wrong: int, total: int, *, note: str = "") -> Row:
    """A row of a count of mistakes, of which none are allowed."""
    text = f"none of {total}"
    return Row(item, float(wrong), "wrong", 0.0, None, text, wrong == 0 and total > 0, note=note)
