"""A scheduler with its updater and a fake device, which checks the rules of every step."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

import pytest

from replicas.core.block_events import BlockEventLog, FindableBlocks
from replicas.core.cost_model import CostModel
from replicas.core.preemption.last_admitted import LastAdmitted
from replicas.core.preemption.policy import PreemptionPolicy
from replicas.core.preemption.preempter import PreemptionMode
from replicas.core.request import Choice, ChoiceKey
from replicas.core.scheduler import Scheduler, SchedulerConfig
from replicas.core.scheduler_output import (
    FinishedChoice,
    SchedulerOutput,
    StepOutcome,
    StepResult,
)
from replicas.core.updater import StepUpdater
from replicas.protocol import (
    ChoiceProgress,
    FinishReason,
    GenerateRequest,
    Receipt,
    TokenDelta,
)
from tests.replicas.core.builders import make_kv
from tests.replicas.core.fake_device import (
    EOS,
    FakeDevice,
    FakeHost,
    reference,
    reference_prompt_logprobs,
)

DEPTH = 1
"""Steps in flight, unless a test says otherwise; see the fixture `depth`."""

BOTH_DEPTHS = pytest.mark.usefixtures("depth")
ONE_STEP = pytest.mark.parametrize("depth", [1], indirect=True, ids=["one step"])
"""For tests of what is in which step, where the others of a module run at both depths."""


class Replica:
    """Steps a scheduler; keeps what the client of every choice has seen."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 4,
        *,
        caching: bool = True,
        max_num_seqs: int = 8,
        budget: int = 64,
        max_model_len: int = 10_000,
        by_priority: bool = False,
        min_progress_tokens: int = 8,
        watermark: float = 0.0,
        look_ahead: bool = False,
        hysteresis: float = 0.0,
        overcommit: float = 0.0,
        policy: PreemptionPolicy | None = None,
        mode: PreemptionMode = PreemptionMode.SWAP,
        host_slots: int = 0,
        spill_tokens: int | None = None,
        copy_steps: int = 0,
        patience: float = 1e9,
        copy_fails: Callable[[], bool] = lambda: False,
        costs: CostModel | None = None,
        copy_s: float = 1e-4,
        token_s: float = 0.0,
        depth: int | None = None,
    ) -> None:
        """A copy to or from the host ends `copy_steps` steps after the one that started it, and
        says that it took `copy_s`; `copy_fails` says, for each, whether it fails. A step says
        that it took `token_s` for each of its tokens. Up to `depth` steps are in flight: the
        device carries them out when they are given out, and what they gave is known later."""
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            by_priority=by_priority,
            min_progress_tokens=min_progress_tokens,
            watermark=watermark,
            look_ahead=look_ahead,
            hysteresis=hysteresis,
            overcommit=overcommit,
            preemption_mode=mode,
            restore_patience_s=patience,
        )
        self._events = BlockEventLog()
        self._found = FindableBlocks()
        kv = make_kv(
            num_blocks,
            block_size,
            caching=caching,
            host_slots=host_slots,
            spill_tokens=spill_tokens,
            events=self._events,
            costs=costs,
        )
        self.scheduler = Scheduler(self.config, kv, policy or LastAdmitted())
        self._token_s = token_s
        self.updater = StepUpdater(self.scheduler, (EOS,))
        self.device = FakeDevice(num_blocks, block_size)
        self.host = FakeHost(self.device, host_slots, copy_steps, copy_fails, copy_s)
        self._depth = depth or DEPTH
        self._flights: deque[tuple[SchedulerOutput, StepResult]] = deque()
        self.now = 0.0
        self.requests: dict[str, GenerateRequest] = {}
        self.outputs: dict[ChoiceKey, list[int]] = {}
        self.last: dict[ChoiceKey, TokenDelta] = {}
        self.aborted: set[ChoiceKey] = set()
        self.finished: list[FinishedChoice] = []
        self.first_token_s: list[float] = []
        self.steps: list[SchedulerOutput] = []
        self._num_preempted = 0
        self._outputs_at_admission: dict[ChoiceKey, int] = {}
        self._preempted_at: dict[ChoiceKey, list[float]] = defaultdict(list)
        self._resumed_at: dict[ChoiceKey, list[float]] = defaultdict(list)

    @property
    def limit(self) -> int:
        """Prompt and output tokens of one choice at the most."""
        return min(self.config.max_model_len, self.scheduler.kv.capacity_tokens + 1)

    def submit(self, *requests: GenerateRequest) -> None:
        for data in requests:
            self.scheduler.add(data, self.now)
            self.requests[data.request_id] = data
            progress = data.progress or (ChoiceProgress(),) * data.n
            for index, each in enumerate(progress):
                if not each.finished:
                    self.outputs[data.request_id, index] = list(each.output_token_ids)

    def abort(self, request_id: str, index: int | None = None) -> None:
        live = self.live(request_id, index)
        outcome = self.updater.abort(request_id, index, self.now)
        assert [(delta.request_id, delta.choice) for delta in outcome.deltas] == live
        assert all(not delta.token_ids and delta.receipt for delta in outcome.deltas)
        reasons = [event.finish_reason for event in outcome.deltas]
        assert reasons == [event.reason for event in outcome.finished]
        assert reasons == [FinishReason.ABORT] * len(live)
        self.aborted.update(live)
        self.finished += outcome.finished
        self.scheduler.check_integrity()
        self._check_events()

    def live(self, request_id: str, index: int | None = None) -> list[ChoiceKey]:
        """The choices of a request that have neither ended nor been aborted."""
        return [
            key
            for key in self.outputs
            if key[0] == request_id
            and key not in self.last
            and key not in self.aborted
            and index in (None, key[1])
        ]

    def known(self, key: ChoiceKey) -> list[int]:
        return [*self.requests[key[0]].prompt_token_ids, *self.outputs[key]]

    def choice(self, request_id: str, index: int = 0) -> Choice:
        return self.scheduler.requests[request_id].choices[index]

    @property
    def in_flight(self) -> list[SchedulerOutput]:
        """The steps whose results are to be taken in, the oldest first."""
        return [output for output, _ in self._flights]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._flights)

    def schedule(self) -> SchedulerOutput:
        """The first half of a step, with the rules that hold for each one."""
        scheduler, before = self.scheduler, list(self.scheduler.running)
        has_work, epochs = scheduler.has_work, {c: c.preemptions for c in before}
        waits_for_copies = scheduler.num_copies > 0
        protected = {c for c in before if c.preemptions and self._lacks_progress(c.key)}
        leader_needs_blocks = (
            before
            and before[0].num_schedulable_tokens == 1
            and (scheduler.kv.missing_blocks(before[0], 1) > scheduler.kv.pool.num_free)
        )
        self.now += 1
        output = scheduler.schedule(self.now)
        self._num_preempted += output.num_preempted
        scheduler.check_integrity()
        assert output.num_tokens <= self.config.max_num_batched_tokens
        assert len(scheduler.running) <= self.config.max_num_seqs
        keys = [item.key for item in output.scheduled]
        assert len(set(keys)) == len(keys)
        assert set(keys) <= {c.key for c in scheduler.running}
        assert all(item.token_ids for item in output.scheduled)
        waits_for_copies = waits_for_copies or bool(output.host_copies)
        assert bool(keys) or waits_for_copies or not has_work or self._flights, (
            "nothing is done though there is work"
        )
        if before:
            assert before[0].preemptions == epochs[before[0]], "the leader was preempted"
        if not leader_needs_blocks:
            unharmed = {c for c in protected if c.preemptions == epochs[c]}
            assert protected == unharmed, "preempted again without progress"
        if output.num_preempted:
            assert set(scheduler.running) < set(before), "admitted in a step that preempted"
        for choice, epoch in epochs.items():
            if choice.preemptions > epoch:
                self._preempted_at[choice.key].append(self.now)
        for choice in set(scheduler.running) - set(before):
            assert len(choice.blocks) == scheduler.kv.blocks_for(choice.num_known_tokens)
            self._outputs_at_admission[choice.key] = len(self.outputs[choice.key])
        self._note_ready()
        return output

    def finish_step(self, output: SchedulerOutput) -> StepOutcome:
        """The second half, of a step that nothing overlaps."""
        self._launch(output)
        return self.take()

    def fill(self) -> None:
        """Give the device as many steps as may be in flight."""
        while len(self._flights) < self._depth:
            ahead = bool(self._flights)
            if ahead and not self.scheduler.can_run_ahead:
                return
            output = self.schedule()
            if ahead and not output.scheduled:
                self.host.start(output.host_copies)
                return
            self._launch(output)

    def _launch(self, output: SchedulerOutput) -> None:
        self.steps.append(output)
        self.host.start(output.host_copies)
        result = self.device.run(output, self.requests, self.known)
        result = replace(result, compute_s=self._token_s * output.num_tokens)
        self._flights.append((output, result))
        self._check_flights()

    def take(self) -> StepOutcome:
        """Take the oldest step's results in: update, deliver."""
        output, result = self._flights.popleft()
        outcome = self.updater.update(output, result, self.now)
        self.scheduler.check_integrity()
        self._check_flights()
        for delta in outcome.deltas:
            self._deliver(delta)
        self.finished += outcome.finished
        self.first_token_s += outcome.first_token_s
        self.scheduler.end_copies(self.host.ended(), self.now)
        self.scheduler.check_integrity()
        self._note_ready()
        self._check_events()
        return outcome

    def step(self) -> SchedulerOutput:
        """Gives the step whose results were taken in."""
        self.fill()
        output = self._flights[0][0]
        self.take()
        return output

    def run(self, max_steps: int = 1000) -> None:
        """Step until nothing is left to do, then check all there is to check."""
        for _ in range(max_steps):
            if not self.has_work:
                break
            self.step()
        self.check_idle()

    def check_idle(self) -> None:
        """Everybody has ended with what an undisturbed run gives, and nothing leaked."""
        scheduler = self.scheduler
        assert not self.has_work
        assert not scheduler.requests
        assert scheduler.kv.pool.num_used == 0
        scheduler.check_integrity()
        for key, outputs in self.outputs.items():
            expected, reason = reference(self.requests[key[0]], key[1], self.limit)
            if key in self.aborted:
                assert outputs == expected[: len(outputs)]
            else:
                assert (outputs, self.last[key].finish_reason) == (expected, reason)
        self._check_stats()

    def _deliver(self, delta: TokenDelta) -> None:
        key, data = (delta.request_id, delta.choice), self.requests[delta.request_id]
        assert key not in self.last, "a delta after the end"
        assert key not in self.aborted, "a delta after an abort"
        wants_logprobs = data.sampling.prompt_logprobs is not None
        if wants_logprobs and delta.choice == 0 and not self.outputs[key]:
            assert delta.prompt_logprobs == reference_prompt_logprobs(data)
        else:
            assert delta.prompt_logprobs is None
        self.outputs[key] += delta.token_ids
        if delta.finish_reason is not None:
            assert delta.receipt is not None
            self._check_receipt(key, delta.receipt)
            stopped = delta.finish_reason is FinishReason.STOP
            assert delta.stop_token_id == (delta.token_ids[-1] if stopped else None)
            self.last[key] = delta

    def _check_flights(self) -> None:
        """Every choice counts what is in flight of it, and nothing else."""
        for request in self.scheduler.requests.values():
            for choice in request.choices:
                items = [
                    item
                    for output, _ in self._flights
                    for item in output.scheduled
                    if (item.key, item.epoch) == (choice.key, choice.epoch) and choice.blocks
                ]
                tokens = sum(len(item.token_ids) for item in items)
                assert choice.in_flight_tokens == tokens
                assert choice.in_flight_draws == sum(1 for item in items if item.draws)

    def _check_events(self) -> None:
        """All block events so far give what can be found now."""
        kv, found = self.scheduler.kv, self._found
        found.apply(self._events.take())
        assert found.device == set(kv.pool.digests)
        tier = kv.offloader.tier if kv.offloader is not None and kv.caching else None
        assert found.host == (set() if tier is None else set(tier.digests))

    def _lacks_progress(self, key: ChoiceKey) -> bool:
        progress = len(self.outputs[key]) - self._outputs_at_admission[key]
        return progress < self.config.min_progress_tokens

    def _note_ready(self) -> None:
        """Who lost its blocks has them back, filled."""
        for choice in self.scheduler.running:
            stops, goes = self._preempted_at[choice.key], self._resumed_at[choice.key]
            while not choice.arriving and len(goes) < len(stops):
                # One preempted anew while it still waited for its blocks stalled without a break.
                later = stops[len(goes) + 1 :]
                goes.append(later[0] if later else self.now)

    def _check_receipt(self, key: ChoiceKey, receipt: Receipt) -> None:
        stops, goes = self._preempted_at[key], self._resumed_at[key]
        assert receipt.preemptions == len(stops) == len(goes)
        assert receipt.stall_s == sum(goes) - sum(stops)
        took_over = bool(self.requests[key[0]].progress)
        assert receipt.recomputed_tokens == 0 or receipt.preemptions > 0 or took_over
        assert receipt.cached_tokens < len(self.requests[key[0]].prompt_token_ids)

    def _check_stats(self) -> None:
        stats = self.scheduler.stats
        taken_over = {key for key, data in self.requests.items() if data.progress}
        known = sum(
            len(each.output_token_ids)
            for data in self.requests.values()
            for each in data.progress
            if not each.finished
        )
        started = {key[0] for key, outputs in self.outputs.items() if outputs} - taken_over
        assert stats.generation_tokens == sum(map(len, self.outputs.values())) - known
        assert stats.prompt_tokens == sum(len(self.requests[r].prompt_token_ids) for r in started)
        assert len(self.first_token_s) == len(started)
        assert len(self.finished) == len(self.outputs) == sum(stats.finished.values())
        assert stats.finished[FinishReason.ABORT] == len(self.aborted)
        assert stats.preemptions == self._num_preempted
        assert stats.prefix_cache_hits <= stats.prefix_cache_queries
        assert stats.recomputed_tokens == 0 or stats.preemptions > 0 or taken_over
        self._check_host()

    def _check_host(self) -> None:
        """Nothing is under way, pinned or owned; what is left are prefixes worth keeping."""
        offloader = self.scheduler.kv.offloader
        if offloader is None:
            return
        assert offloader.num_copies == 0
        assert offloader.tier.num_pinned == 0
        offloader.tier.check_integrity(())
        if not self.scheduler.kv.caching:
            assert offloader.tier.num_used == 0
