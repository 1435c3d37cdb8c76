"""Timing by graph replay, on a device that is a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from tests.gpu_check import timing
from tests.gpu_check.rig import Rig
from tests.gpu_check.timing import Graph, pools_for, replayed


class FakeCuda:
    """Calls take device time when they run; what is captured runs when it is replayed. Starting a
    graph costs as much as `START_S`, whatever is in it."""

    START_S = 2e-6

    def __init__(self) -> None:
        self.now_s = 0.0
        self.graphs: list[FakeGraph] = []
        self.capturing: FakeGraph | None = None
        fake = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_s = fake.now_s

            def elapsed_time(self, end: Event) -> float:
                return (end.at_s - self.at_s) * 1e3

        self.Event = Event

    def is_available(self) -> bool:
        return True

    def synchronize(self) -> None:
        assert self.capturing is None

    def Stream(self) -> SimpleNamespace:  # noqa: N802 - torch's name
        return SimpleNamespace(wait_stream=lambda other: None)

    current_stream = Stream

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802 - torch's name
        self.graphs.append(FakeGraph(self))
        return self.graphs[-1]

    @contextmanager
    def graph(self, graph: FakeGraph) -> Iterator[None]:
        self.capturing = graph
        yield
        self.capturing = None

    def work(self, seconds: float, log: list[float]) -> Callable[[], float]:
        """A kernel's call."""

        def run() -> None:
            self.now_s += seconds
            log.append(seconds)

        def call() -> float:
            if self.capturing is not None:
                self.capturing.kernels.append(run)
            else:
                run()
            return seconds

        return call


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.kernels: list[Callable[[], None]] = []

    def replay(self) -> None:
        self.cuda.now_s += FakeCuda.START_S
        for kernel in self.kernels:
            kernel()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=fake))
    return fake


@pytest.mark.parametrize("seconds", [4e-6, 250e-6, 5e-3])
def test_a_call_takes_what_a_replay_takes_divided_by_its_calls(
    cuda: FakeCuda, seconds: float
) -> None:
    log: list[float] = []
    calls = [cuda.work(seconds, log) for _ in range(3)]
    found = replayed(Rig(dry=False), calls)
    captured = len(cuda.graphs[0].kernels)
    assert captured % 3 == 0, "all inputs take turns equally"
    assert found.median_s == pytest.approx(seconds + FakeCuda.START_S / captured)
    assert FakeCuda.START_S / captured < 0.02 * seconds, "starting a graph is not what is timed"
    assert captured * seconds < 0.1
    assert len(log) > 20 * captured, "a median of at least 20 replays"


def test_the_median_ignores_what_happens_rarely(cuda: FakeCuda) -> None:
    count = 0

    def slow_at_times() -> None:
        nonlocal count
        count += 1
        cuda.now_s += 9.0 if count % 5 == 0 else 1.0

    found = timing.by_events(slow_at_times, repeats=20)
    assert (found.median_s, found.low_s, found.high_s) == (1.0, 1.0, 9.0)


def test_a_graph_keeps_as_many_outputs_as_inputs_take_turns(cuda: FakeCuda) -> None:
    calls = [cuda.work(seconds, []) for seconds in (1.0, 2.0, 3.0)]
    assert list(Graph(calls * 4, keep=3).outputs) == [1.0, 2.0, 3.0]
    assert list(Graph(calls).outputs) == [1.0, 2.0, 3.0]


def test_small_inputs_take_turns_until_no_cache_holds_them() -> None:
    rig = Rig(dry=False)
    assert pools_for(rig, 1e9) == 3
    assert pools_for(rig, 16.8e6) * 16.8e6 > 4 * 50e6
    assert pools_for(rig, 1.0) == 24
    assert pools_for(Rig(dry=True), 1.0) == 1
