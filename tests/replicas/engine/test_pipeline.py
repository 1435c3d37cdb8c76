"""The order of launches, results and copies, and the time that each step is charged."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from replicas.core.block_transfer import EndedCopy, Restore, Save
from replicas.core.cost_model import CostModel
from replicas.core.request import ChoiceKey
from replicas.core.scheduler_output import SchedulerOutput, StepResult
from replicas.engine.in_flight import InFlight
from replicas.engine.pipeline import Pipeline, depth_for
from replicas.protocol import GenerateRequest
from tests.replicas.core.builders import make_request
from tests.replicas.core.fake_device import FakeDevice, reference
from tests.replicas.core.harness import Replica
from tests.replicas.engine.driver import ask, make_engine, serve
from tests.replicas.engine.tiny_models import Twin, random_prompt


class Clock:
    """Time passes where somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Flight:
    """A step whose end the host waits for."""

    def __init__(self, result: StepResult, wait: Callable[[], None]) -> None:
        self._result = result
        self._wait = wait

    def result(self) -> StepResult:
        self._wait()
        return self._result


class Device:
    """Computes each step in `step_s`, one after the other, beside a host whose every launch takes
    `launch_s`; says in `log` what happened."""

    def __init__(self, fake: FakeDevice, clock: Clock, step_s: float, launch_s: float) -> None:
        self.log: list[str] = []
        self.requests: dict[str, GenerateRequest] = {}
        self.outputs: dict[ChoiceKey, list[int]] = {}
        self._fake = fake
        self._clock = clock
        self._step_s = step_s
        self._launch_s = launch_s
        self._launched = 0
        self._free_at = 0.0

    def launch(self, output: SchedulerOutput) -> InFlight:
        self._launched += 1
        number = self._launched
        self.log.append(f"launch {number}" if output.scheduled else f"nothing {number}")
        self._clock.now += self._launch_s
        result = self._fake.run(output, self.requests, self._known)
        ends_at = max(self._clock.now, self._free_at) + self._step_s * bool(output.scheduled)
        self._free_at = ends_at

        def wait() -> None:
            self.log.append(f"result {number}")
            self._clock.now = max(self._clock.now, ends_at)

        return Flight(result, wait)

    def _known(self, key: ChoiceKey) -> Sequence[int]:
        return [*self.requests[key[0]].prompt_token_ids, *self.outputs[key]]


class Copier:
    """Ends all copies at once."""

    def __init__(self, log: list[str], replica: Replica) -> None:
        self._log = log
        self._host = replica.host

    def start(self, copies: Sequence[Save | Restore]) -> None:
        self._host.start(copies)

    def ended(self) -> list[EndedCopy]:
        return self._host.ended()

    def wait(self, timeout_s: float) -> None:
        self._log.append("wait")


class Bench:
    """A pipeline over the core's fake device."""

    def __init__(
        self, depth: int, replica: Replica, *, step_s: float = 10.0, launch_s: float = 1.0
    ) -> None:
        self.clock = Clock()
        self.device = Device(replica.device, self.clock, step_s, launch_s)
        self.log = self.device.log
        copier = Copier(self.log, replica)
        self._replica = replica
        self.pipeline = Pipeline(
            replica.scheduler, replica.updater, self.device, copier, self.clock, depth
        )

    def send(self, *requests: GenerateRequest) -> None:
        for data in requests:
            self._replica.scheduler.add(data, self.clock.now)
            self.device.requests[data.request_id] = data
            self.device.outputs.update({(data.request_id, i): [] for i in range(data.n)})

    def run(self) -> None:
        """To the end; everybody must get what an undisturbed run gives."""
        while self.pipeline.has_work:
            for delta in self.pipeline.step().deltas:
                self.device.outputs[delta.request_id, delta.choice] += delta.token_ids
            self._replica.scheduler.check_integrity()
        for (name, index), output in self.device.outputs.items():
            assert output == reference(self.device.requests[name], index, 10_000)[0]
        assert self._replica.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (1, "launch 1, result 1, launch 2, result 2, launch 3, result 3"),
        (2, "launch 1, launch 2, result 1, launch 3, result 2, result 3"),
    ],
)
def test_results_are_waited_for_as_late_as_the_depth_allows(depth: int, expected: str) -> None:
    bench = Bench(depth, Replica(8))
    bench.send(make_request("a", range(5), max_tokens=3))
    bench.run()
    assert ", ".join(bench.log) == expected


@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("cuda", 2), ("cuda:1", 2)])
def test_steps_overlap_beside_a_gpu_only(device: str, depth: int) -> None:
    assert depth_for(device) == depth


@pytest.mark.parametrize("depth", [0, 3])
def test_two_steps_are_the_most(depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth is 1 or 2, not {depth}"):
        Bench(depth, Replica(8))


class Ledger(CostModel):
    """Keeps what each step was charged."""

    def __init__(self) -> None:
        super().__init__(block_bytes=4)
        self.charged: list[float] = []

    def observe_step(self, prefill_tokens: int, decoding: int, seconds: float) -> float:
        self.charged.append(seconds)
        return super().observe_step(prefill_tokens, decoding, seconds)


@pytest.mark.parametrize(("depth", "charged"), [(1, [11.0] * 4), (2, [11.0, 10.0, 10.0, 10.0])])
def test_a_step_is_charged_for_its_own_time(depth: int, charged: list[float]) -> None:
    """The device takes 10 s for each, the host 1 s: beside it, but for the first. Nobody is
    charged for a rest."""
    ledger = Ledger()
    bench = Bench(depth, Replica(8, costs=ledger))
    for name in "ab":
        begin = bench.clock.now
        bench.send(make_request(name, range(5), max_tokens=4))
        bench.run()
        assert bench.clock.now == begin + sum(charged)
        bench.clock.now += 1000.0
    assert ledger.charged == charged * 2


def test_copies_are_waited_for_only_where_nothing_is_in_flight() -> None:
    replica = Replica(6, host_slots=20, copy_steps=1)
    bench = Bench(2, replica)
    bench.send(*(make_request(f"r{i}", (i, 1, 2, 3, 4), max_tokens=14) for i in (1, 2)))
    bench.run()
    assert replica.scheduler.stats.swaps > 0
    waits = [index for index, entry in enumerate(bench.log) if entry == "wait"]
    assert waits
    for index in waits:
        step = bench.log[index - 1].removeprefix("result ")
        assert bench.log[index - 2] == f"nothing {step}", "a step was in flight"


def test_a_stop_is_seen_a_step_late_and_its_surplus_is_waited_for(llama: Twin) -> None:
    prompt = random_prompt(20)
    stop = llama.generate(prompt, 16)[4]
    engine = make_engine(llama.paged, depth=2)
    engine.add(ask("a", prompt, stop_token_ids=(stop,)))
    deltas = []
    while not any(delta.finish_reason for delta in deltas):
        deltas += engine.step().deltas
    assert engine.live_request_ids() == []
    assert engine.snapshot().used_blocks == 0
    assert engine.has_work, "the step behind the last one"
    assert engine.step().deltas == ()
    assert not engine.has_work


def test_the_same_batches_give_the_very_same_logprobs(llama: Twin) -> None:
    """Steps that are alike but for their overlap: not even the rounding differs."""
    requests = [
        ask(str(i), random_prompt(5 + 6 * i, i), 12, temperature=i / 3, logprobs=2)
        for i in range(4)
    ]
    requests.append(ask("scored", random_prompt(30), 12, logprobs=0, prompt_logprobs=1))
    one, two = (serve(make_engine(llama.paged, depth=depth), *requests) for depth in (1, 2))
    for key, answer in one.items():
        assert two[key].token_ids == answer.token_ids
        assert two[key].logprobs == answer.logprobs
        assert two[key].prompt_logprobs == answer.prompt_logprobs
