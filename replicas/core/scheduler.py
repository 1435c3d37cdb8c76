"""Which tokens the next step computes: one token budget for prefill, decode and resuming."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from replicas.core.admission import Admission
from replicas.core.block_transfer import EndedCopy
from replicas.core.cost_model import CostModel
from replicas.core.host_traffic import HostTraffic
from replicas.core.kv_manager import KVManager
from replicas.core.preemption.ledger import ResumeLedger
from replicas.core.preemption.policy import PreemptionPolicy
from replicas.core.preemption.preempter import Preempter, PreemptionMode
from replicas.core.request import Choice, ChoiceState, Request
from replicas.core.scheduler_output import ScheduledChoice, SchedulerOutput
from replicas.core.scheduler_stats import SchedulerStats
from replicas.core.step_draft import StepDraft
from replicas.protocol import GenerateRequest


class RequestRefusedError(ValueError):
    """The request can never be served by this replica; the message names the limit."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of one choice."""

    max_num_seqs: int
    """Choices that run at once."""
    max_num_batched_tokens: int
    """Tokens one step computes at the most."""
    max_model_len: int
    """Prompt and output tokens of one choice at the most."""
    by_priority: bool = False
    """Order by the request's priority before its arrival."""
    min_progress_tokens: int = 8
    """Tokens a resumed choice produces before it can be preempted again."""
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    look_ahead: bool = True
    """Whether admission reckons with what running choices are expected to need."""
    watermark: float = 0.01
    """Share of the pool that admission leaves free for the running choices to grow into."""
    hysteresis: float = 0.05
    """The same after a preemption, for choices that come for the first time."""
    overcommit: float = 0.0
    """Share of the pool by which the peak that admission expects may exceed it."""
    restore_patience_s: float = 5.0
    """A restore that takes longer is given up: the KV is computed instead."""


class Scheduler:
    """Owns the queue and the running set; the engine thread is its only caller.

    Admission gives a choice blocks for its whole known history, so only growth by decoding
    can run out of blocks. Then somebody is preempted: blocks go back, history stays, and
    the choice waits at its old place to be resumed like any other prefix. The leader (the
    best-ranked running choice) may preempt anyone and is preempted by nobody, hence
    something always makes progress. With a host tier, KV may be kept there meanwhile: a
    resumed choice gets it back before it computes the rest.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        policy: PreemptionPolicy,
    ) -> None:
        self.config = config
        self.kv = kv
        self.stats = SchedulerStats()
        self.resumes = ResumeLedger(kv.costs)
        self.admission = Admission(
            kv,
            look_ahead=config.look_ahead,
            watermark=config.watermark,
            hysteresis=config.hysteresis,
            overcommit=config.overcommit,
        )
        self.requests: dict[str, Request] = {}
        self.running: list[Choice] = []
        self.waiting: list[Choice] = []
        self._preempter = Preempter(kv, policy, config.preemption_mode)
        self._traffic = HostTraffic(kv, self.resumes, self.stats)
        self._arrivals = 0
        self._admissions = 0

    @property
    def costs(self) -> CostModel:
        """What the measured rates are."""
        return self.kv.costs

    @property
    def has_work(self) -> bool:
        """Whether anybody runs or waits, or a copy has not ended."""
        return bool(self.running or self.waiting or self.num_copies)

    @property
    def num_copies(self) -> int:
        """Block copies between device and host that have not ended."""
        return 0 if self.kv.offloader is None else self.kv.offloader.num_copies

    @property
    def can_run_ahead(self) -> bool:
        """Whether it pays to schedule a step while the one before is in flight.

        Not where more choices would wait for its tokens than go on: they would take part in
        every other step only, and a batch of such choices fall into two halves.
        """
        waiting = [c for c in self.running if c.in_flight_draws and c.needs_last_token]
        ready = sum(1 for c in self.running if self._is_ready(c))
        return not waiting or ready > len(waiting)

    def add(self, data: GenerateRequest, now: float) -> None:
        """Queue a request; raises RequestRefusedError where it can never be served."""
        self._check(data)
        self._arrivals += 1
        priority = data.priority if self.config.by_priority else 0
        request = Request(data, rank=(priority, self._arrivals), arrived_at=now)
        self.requests[request.id] = request
        for choice in request.live_choices() if request.forked else request.choices[:1]:
            self.enqueue(choice)

    def schedule(self, now: float) -> SchedulerOutput:
        """Put the next step together: running choices first, then waiting ones."""
        step = StepDraft(self.config.max_num_batched_tokens)
        self._give_up_late_restores(now)
        self._schedule_running(step, now)
        if not step.num_preempted:
            self._schedule_waiting(step, now)
        offloader = self.kv.offloader
        if offloader is None:
            return step.give_out(())
        # What the running choices may grow into next: a block each, and each that forks off.
        self.kv.spill(sum(1 + self.admission.unborn(choice) for choice in self.running))
        self.stats.spilled_blocks = offloader.num_spilled
        return step.give_out(offloader.take())

    def end_copies(self, ended: Sequence[EndedCopy], now: float) -> None:
        """Take in copies between device and host that ended, well or not."""
        self._traffic.end(ended, self.running, self.waiting, now)

    def find(self, item: ScheduledChoice) -> Choice | None:
        """The running choice that a result of `item` belongs to; None where it is stale."""
        request = self.requests.get(item.key[0])
        if request is None or item.key[1] >= len(request.choices):
            return None  # it has ended; its id may be that of another request by now
        choice = request.choices[item.key[1]]
        current = choice.state is ChoiceState.RUNNING and choice.epoch == item.epoch
        return choice if current else None

    def reaches_limit(self, choice: Choice, num_outputs: int) -> bool:
        """Whether the choice ends with its output token number `num_outputs`, whatever it is."""
        # One that outgrows the whole pool ends with what it has.
        limit = min(self.config.max_model_len, self.kv.capacity_tokens + 1)
        known = choice.request.num_prompt_tokens + num_outputs
        return num_outputs >= choice.sampling.max_tokens or known >= limit

    def enqueue(self, choice: Choice) -> None:
        """Let a choice wait at the place its rank gives it."""
        choice.state = ChoiceState.WAITING
        insort(self.waiting, choice, key=lambda c: c.rank)

    def start(self, choice: Choice) -> None:
        """Let a choice that has its blocks run."""
        choice.state = ChoiceState.RUNNING
        choice.progress = 0
        self._admissions += 1
        choice.epoch = self._admissions
        insort(self.running, choice, key=lambda c: c.rank)

    def finish(self, choice: Choice, *, by_itself: bool = False) -> None:
        """End a choice in whatever state it is; its blocks go back. Idempotent."""
        if choice.state is ChoiceState.FINISHED:
            return
        self.admission.note_end(choice, by_itself=by_itself)
        if choice.state is ChoiceState.RUNNING:
            self.running.remove(choice)
        elif choice.state is ChoiceState.WAITING:
            self.waiting.remove(choice)
        self.kv.release(choice, ended=True)
        if self.kv.offloader is not None:
            self.kv.offloader.forget(choice)
        choice.state = ChoiceState.FINISHED
        live = choice.request.live_choices()
        if not live:
            self.requests.pop(choice.request.id, None)
        elif not choice.request.forked and live[0].state is ChoiceState.PENDING:
            self.enqueue(live[0])  # the leader went before the prompt was done

    def abort(self, request_id: str, index: int | None = None) -> list[Choice]:
        """End one choice, or all of a request; unknown ones are fine. Returns the ended."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        ended = [c for c in request.live_choices() if index is None or c.index == index]
        # The leader last: its end would promote a choice that is about to end as well.
        for choice in reversed(ended):
            self.finish(choice)
        return ended

    def check_integrity(self) -> None:
        """Raise AssertionError where blocks, queues and states disagree."""
        live = [c for request in self.requests.values() for c in request.live_choices()]
        self.kv.check_integrity(live)
        for state, queue in (
            (ChoiceState.RUNNING, self.running),
            (ChoiceState.WAITING, self.waiting),
        ):
            if sorted(c.key for c in queue) != sorted(c.key for c in live if c.state is state):
                raise AssertionError(f"the {state.name} choices are not those in the queue")
        idle = [c for c in live if c.state is not ChoiceState.RUNNING]
        if any(c.blocks or c.in_flight_tokens or c.in_flight_draws for c in idle):
            raise AssertionError("a choice that does not run holds blocks or is in flight")

    def _check(self, data: GenerateRequest) -> None:
        length, pool = len(data.prompt_token_ids), self.kv.capacity_tokens
        if not data.prompt_token_ids:
            raise RequestRefusedError("the prompt is empty")
        if length + 1 > pool:
            raise RequestRefusedError(
                f"the prompt's {length} tokens and one more do not fit the KV pool of {pool} tokens"
            )
        if length + 1 > self.config.max_model_len:
            raise RequestRefusedError(
                f"the prompt's {length} tokens leave no room for output within max_model_len "
                f"{self.config.max_model_len}"
            )
        if data.request_id in self.requests:
            raise RequestRefusedError(f"request id {data.request_id!r} is in use")
        if data.progress:
            self._check_progress(data)

    def _check_progress(self, data: GenerateRequest) -> None:
        if len(data.progress) != data.n or all(each.finished for each in data.progress):
            raise RequestRefusedError("progress must name each choice, and one at least unfinished")
        outputs = max(len(p.output_token_ids) for p in data.progress if not p.finished)
        known = len(data.prompt_token_ids) + outputs
        limit = min(self.kv.capacity_tokens, self.config.max_model_len - 1)
        if known > limit:
            raise RequestRefusedError(
                f"the {known} tokens that are known already exceed the {limit} that fit here"
            )

    def _schedule_running(self, step: StepDraft, now: float) -> None:
        # Decoding choices first: a long prefill must not take the budget of those who stream.
        for decoding in (True, False):
            for choice in list(self.running):
                if step.budget < 1:
                    return
                decodes = choice.num_schedulable_tokens == 1
                if decodes is decoding and self._is_ready(choice):
                    self._schedule_choice(step, choice, now)

    def _is_ready(self, choice: Choice) -> bool:
        """Whether a step can compute the choice's next tokens now."""
        if choice.state is not ChoiceState.RUNNING or choice.arriving:
            return False
        if not choice.in_flight_draws:
            return choice.num_schedulable_tokens > 0
        ahead = len(choice.output_token_ids) + choice.in_flight_draws
        return not choice.needs_last_token and not self.reaches_limit(choice, ahead)

    def _schedule_choice(self, step: StepDraft, choice: Choice, now: float) -> None:
        num_tokens = min(choice.num_schedulable_tokens, step.budget)
        while (missing := self.kv.missing_blocks(choice, num_tokens)) > self.kv.pool.num_free:
            if missing <= self.kv.pool.num_free + self._num_leaving_blocks():
                return  # blocks are being written to the host: they come free soon
            victim = self._victim(choice)
            if victim is None:
                return
            # The step holds nothing of the victim yet: only decoding takes blocks, and who
            # decodes comes in order of rank, which no victim betters.
            step.num_preempted += 1
            self._preempt(victim, now)
            if victim is choice:
                return
        step.add(choice, num_tokens, self.kv.grow(choice, num_tokens))

    def _victim(self, needy: Choice) -> Choice | None:
        """Who gives way to `needy`; None where it must stand still for this step."""
        if needy is self.running[0]:
            candidates = self.running[1:]
        else:
            candidates = [
                c
                for c in self.running
                if c.rank >= needy.rank
                and (not c.returns or c.progress >= self.config.min_progress_tokens)
            ]
        return self._preempter.choose(candidates)

    def _num_leaving_blocks(self) -> int:
        return 0 if self.kv.offloader is None else self.kv.offloader.num_leaving_blocks

    def _preempt(self, choice: Choice, now: float) -> None:
        self.running.remove(choice)
        self.resumes.close(choice, now, caught_up=False)  # the one before, if it is open yet
        kept = self._preempter.strip(choice)
        choice.preempted_at = now
        self.stats.preemptions += 1
        self.stats.swaps += kept > 0
        self.admission.note_preemption()
        self.enqueue(choice)

    def _give_up_late_restores(self, now: float) -> None:
        for choice in self._traffic.late(self.running, now):
            # The copies still hold their blocks: the choice will get others.
            self.running.remove(choice)
            self.kv.release(choice)
            self.enqueue(choice)

    def _schedule_waiting(self, step: StepDraft, now: float) -> None:
        while self.waiting and step.budget > 0 and len(self.running) < self.config.max_num_seqs:
            choice = self.waiting[0]
            # Strictly in order: passing over the head would starve long prompts.
            if not self._admit(choice, now):
                return
            del self.waiting[0]
            self.start(choice)
            self._note_admission(choice, now)
            if not choice.arriving:
                self._traffic.note_ready(choice, now)
                step.add(choice, min(choice.num_schedulable_tokens, step.budget))

    def _admit(self, choice: Choice, now: float) -> bool:
        reserve = 0
        if self.running:
            reserve = self.admission.reserve(choice)
            if not self.admission.foresees_room(choice, self.running):
                return False
        if not choice.awaits_arrival:
            choice.arrival_deadline = now + self.config.restore_patience_s
        elif now > choice.arrival_deadline:
            choice.shuns_host = True
        return self.kv.admit(choice, reserve)

    def _note_admission(self, choice: Choice, now: float) -> None:
        self.resumes.note_admission(choice)
        if choice.scheduled_at is not None:
            return
        choice.scheduled_at = now
        looks_up = self.kv.caching and choice.sampling.prompt_logprobs is None
        if choice.index == 0 and looks_up and not choice.returns:
            # Only what a request finds when it first comes counts: a resumed one finds itself.
            choice.cached_tokens = choice.num_computed_tokens
            self.stats.prefix_cache_queries += choice.request.num_prompt_tokens
            self.stats.prefix_cache_hits += choice.num_computed_tokens
            if self.kv.offloader is not None:
                missed = choice.request.num_prompt_tokens - choice.num_computed_tokens
                self.stats.host_cache_queries += missed
