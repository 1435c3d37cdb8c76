"""Seconds of device work, by graph replay."""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.gpu_check.rig import Rig

REPEATS = 25
POOLS = 3
"""Different inputs that take turns, so that caches hold none of them from one run to the next."""
_CACHE_BYTES = 60e6
_CACHES = 4
_MOST_POOLS = 24
_LEAST_REPLAY_S = 300e-6
"""A replay shorter than this says more about its start than about its kernels."""
_MOST_CALLS = 96

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one call."""

    median_s: float
    low_s: float
    high_s: float

    @property
    def spread(self) -> str:
        return f"{self.low_s * 1e6:.1f}-{self.high_s * 1e6:.1f} us"


class Graph:
    """Calls recorded once and replayed: a CUDA graph, or on a CPU just the calls.

    They must not wait for the device, and must work on the same memory each time. Tensors that
    they return belong to the graph, which overwrites them with each replay. The last `keep` are
    kept; the memory of the others is used again by later calls.
    """

    def __init__(self, calls: Sequence[Call], keep: int | None = None) -> None:
        self._calls = tuple(calls)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.outputs: deque[object] = deque(maxlen=keep)
        if torch.cuda.is_available():
            self._capture()
        else:
            self.replay()

    def replay(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._call_all()

    def _call_all(self) -> None:
        self.outputs.clear()
        for call in self._calls:
            self.outputs.append(call())

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in dict.fromkeys(self._calls):  # compiles; makes handles and workspaces
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._call_all()


def pools_for(rig: Rig, bytes_read: float) -> int:
    """How many sets of inputs of this size must take turns: three, or more to overflow caches."""
    if rig.small:
        return 1
    wanted = -(-_CACHE_BYTES * _CACHES // max(1.0, bytes_read))
    return int(min(_MOST_POOLS, max(POOLS, wanted)))


def replayed(rig: Rig, calls: Sequence[Call], repeats: int = REPEATS) -> Timing:
    """One call's time: the median over replays of a graph in which `calls`, each on inputs of its
    own, follow each other."""
    if rig.small:
        return _by_clock(calls[:1])
    rough = _rough_s(calls)
    rounds = max(1, min(int(_LEAST_REPLAY_S / rough) + 1, _MOST_CALLS // len(calls)))
    # As many outputs as inputs take turns: one that is written again at once stays in a cache.
    graph = Graph([*calls] * rounds, keep=len(calls))
    count = len(calls) * rounds
    return by_events(graph.replay, repeats, count)


def by_events(run: Call, repeats: int = REPEATS, count: int = 1) -> Timing:
    """The time between events around `run`, which does `count` equal things."""
    run()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return _timing([begin.elapsed_time(end) / 1e3 / count for begin, end in events])


def by_wall(rig: Rig, run: Call, repeats: int = REPEATS) -> Timing:
    """The wall-clock time of `run`, the device's work included."""
    return _by_clock([run] * (1 if rig.dry else repeats), warm_up=not rig.dry)


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory() -> None:
    """Give back what tensors held that are gone: the next ones have other sizes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _rough_s(calls: Sequence[Call]) -> float:
    """About how long one takes: enough to choose how many a graph gets."""
    for call in calls:
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    return max(1e-6, begin.elapsed_time(end) / 1e3 / len(calls))


def _by_clock(calls: Sequence[Call], *, warm_up: bool = False) -> Timing:
    if warm_up:
        calls[0]()
    seconds = []
    for call in calls:
        synchronize()
        begin = time.perf_counter()
        call()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return _timing(seconds)


def _timing(seconds: Sequence[float]) -> Timing:
    return Timing(statistics.median(seconds), min(seconds), max(seconds))
