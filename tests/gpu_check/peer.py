"""How figures of others get into the results: they may fail in any way."""

from __future__ import annotations

from collections.abc import Callable

from tests.gpu_check.records import Peer
from tests.gpu_check.rig import Rig

_LEAST_S = 3.0
"""With less time, nothing is begun."""


def report_peer(
    rig: Rig, item: str, name: str, measure: Callable[[], float], ours_s: float
) -> None:
    """`measure` gives seconds, which are set beside ours; where it fails, it is told why."""
    seconds = _attempt(rig, item, name, measure)
    if seconds is not None:
        rig.recorder.add(Peer(item, name, seconds * 1e6, ours_s * 1e6))


def report_rate(rig: Rig, item: str, name: str, measure: Callable[[], float]) -> None:
    """`measure` gives a rate, to be set beside the item's own row."""
    rate = _attempt(rig, item, name, measure)
    if rate is not None:
        rig.recorder.add(Peer(item, name, rate))


def _attempt(rig: Rig, item: str, name: str, measure: Callable[[], float]) -> float | None:
    if rig.left_s < _LEAST_S:
        rig.recorder.add(Peer(item, name, None, problem="no time left"))
        return None
    try:
        return measure()
    except Exception as error:  # noqa: BLE001 - whatever a peer does, the others are timed
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        rig.recorder.add(Peer(item, name, None, problem=text))
        return None
