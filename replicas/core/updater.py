"""Takes in a step's results: appends tokens, forks, ends choices, says what changed."""

from __future__ import annotations

from replicas.core.request import Choice, Request
from replicas.core.scheduler import Scheduler
from replicas.core.scheduler_output import (
    FinishedChoice,
    SampledToken,
    ScheduledChoice,
    SchedulerOutput,
    StepOutcome,
    StepResult,
)
from replicas.core.stall_watch import StallWatch
from replicas.protocol import FinishReason, TokenDelta


class StepUpdater:
    """The second half of a step; `Scheduler.schedule` is the first."""

    def __init__(self, scheduler: Scheduler, eos_token_ids: tuple[int, ...]) -> None:
        self._scheduler = scheduler
        self._eos = frozenset(eos_token_ids)
        self._stalls = StallWatch(scheduler)
        self._deltas: list[TokenDelta] = []
        self._finished: list[FinishedChoice] = []
        self._first_token_s: list[float] = []
        self._inter_token_s: list[float] = []

    def update(self, output: SchedulerOutput, result: StepResult, now: float) -> StepOutcome:
        """Apply `result`. Results of choices that ended or were preempted since are dropped."""
        seconds_a_token = self._observe(output, result)
        for item in output.scheduled:
            choice = self._scheduler.find(item)
            if choice is not None:
                self._charge(choice, item, seconds_a_token, now)
                self._advance(choice, item, result, now)
        self._deltas += self._stalls.look(now)
        outcome = StepOutcome(
            tuple(self._deltas),
            tuple(self._finished),
            tuple(self._first_token_s),
            tuple(self._inter_token_s),
            self._scheduler.resumes.take(),
        )
        self._deltas.clear()
        self._finished.clear()
        self._first_token_s.clear()
        self._inter_token_s.clear()
        return outcome

    def abort(self, request_id: str, index: int | None, now: float) -> StepOutcome:
        """End one choice, or all of a request; each gets a last delta that bears its receipt."""
        deltas, finished = [], []
        for choice in self._scheduler.abort(request_id, index):
            self._scheduler.resumes.close(choice, now, caught_up=False)
            finished.append(self._account(choice, FinishReason.ABORT, now))
            deltas.append(
                TokenDelta(
                    request_id=request_id,
                    choice=choice.index,
                    token_ids=(),
                    finish_reason=FinishReason.ABORT,
                    receipt=choice.receipt(),
                )
            )
        resumed = self._scheduler.resumes.take()
        return StepOutcome(tuple(deltas), tuple(finished), resumed=resumed)

    def _observe(self, output: SchedulerOutput, result: StepResult) -> float:
        """Teach the cost model; gives what a prefilled token cost in this step, in seconds."""
        lengths = [len(item.token_ids) for item in output.scheduled]
        decoding = sum(1 for item in output.scheduled if item.decodes)
        costs = self._scheduler.costs
        return costs.observe_step(sum(lengths) - decoding, decoding, result.compute_s)

    def _charge(
        self, choice: Choice, item: ScheduledChoice, seconds_a_token: float, now: float
    ) -> None:
        """A resumed choice pays for what it computes until it draws its next token."""
        resume = choice.resume
        if resume is None:
            return
        if not item.decodes:
            resume.actual_s += len(item.token_ids) * seconds_a_token
        if item.draws:
            self._scheduler.resumes.close(choice, now, caught_up=True)

    def _advance(
        self, choice: Choice, item: ScheduledChoice, result: StepResult, now: float
    ) -> None:
        self._count_computed(choice, len(item.token_ids))
        choice.take(len(item.token_ids), item.num_own_draws)
        choice.prompt_logprobs.extend(result.prompt_logprobs.get(item.key, ()))
        self._scheduler.kv.publish(choice)
        if not item.draws:
            return
        request = choice.request
        if not request.forked:
            self._fork(choice, result, now)
        self._append(choice, result.sampled[item.key], now)

    def _fork(self, leader: Choice, result: StepResult, now: float) -> None:
        """The prompt is done: the other choices share its blocks, or wait for room to run."""
        scheduler, request = self._scheduler, leader.request
        request.forked = True
        # Whoever runs takes a block for its next token: without one it would run only to be
        # preempted at once.
        room = scheduler.kv.pool.num_free - scheduler.kv.missing_blocks(leader, 1)
        seats = min(room, scheduler.config.max_num_seqs - len(scheduler.running))
        for child in request.live_choices():
            if child is leader:
                continue
            child.scheduled_at = leader.scheduled_at
            if seats > 0:
                seats -= 1
                scheduler.kv.fork(leader, child)
                child.high_water = child.num_computed_tokens
                scheduler.start(child)
            else:
                scheduler.enqueue(child)
            self._append(child, result.sampled[child.key], now)

    def _append(self, choice: Choice, token: SampledToken, now: float) -> None:
        stats, request = self._scheduler.stats, choice.request
        first = not choice.output_token_ids
        choice.output_token_ids.append(token.token_id)
        choice.progress += 1
        stats.generation_tokens += 1
        if choice.last_token_at is not None:
            self._inter_token_s.append(now - choice.last_token_at)
        if choice.first_token_at is None:
            choice.first_token_at = now
        if first and _is_first_of_request(choice):
            stats.prompt_tokens += request.num_prompt_tokens
            self._first_token_s.append(now - request.arrived_at)
        choice.last_token_at = now

        reason = self._finish_reason(choice, token.token_id)
        stopped = reason is FinishReason.STOP
        prompt_logprobs = None
        if first and choice.index == 0 and choice.sampling.prompt_logprobs is not None:
            prompt_logprobs = tuple(choice.prompt_logprobs)
        self._deltas.append(
            TokenDelta(
                request_id=request.id,
                choice=choice.index,
                token_ids=(token.token_id,),
                logprobs=() if token.logprobs is None else (token.logprobs,),
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason,
                stop_token_id=token.token_id if stopped else None,
                receipt=choice.receipt() if reason or choice.progress == 1 else None,
            )
        )
        if reason is not None:
            self._scheduler.finish(choice, by_itself=True)
            self._finished.append(self._account(choice, reason, now))

    def _finish_reason(self, choice: Choice, token_id: int) -> FinishReason | None:
        sampling, produced = choice.sampling, len(choice.output_token_ids)
        stops = token_id in sampling.stop_token_ids or (
            token_id in self._eos and not sampling.ignore_eos
        )
        if stops and produced >= sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._scheduler.reaches_limit(choice, produced) else None

    def _count_computed(self, choice: Choice, num_tokens: int) -> None:
        start, stop = choice.num_computed_tokens, choice.num_computed_tokens + num_tokens
        again = max(0, min(stop, choice.high_water) - start)
        choice.recomputed_tokens += again
        choice.high_water = max(choice.high_water, stop)
        self._scheduler.stats.computed_tokens += num_tokens
        self._scheduler.stats.recomputed_tokens += again

    def _account(self, choice: Choice, reason: FinishReason, now: float) -> FinishedChoice:
        self._scheduler.stats.finished[reason] += 1
        arrived = choice.request.arrived_at
        scheduled = now if choice.scheduled_at is None else choice.scheduled_at
        first_token = now if choice.first_token_at is None else choice.first_token_at
        return FinishedChoice(
            reason=reason,
            num_prompt_tokens=choice.request.num_prompt_tokens,
            num_output_tokens=len(choice.output_token_ids),
            max_tokens=choice.sampling.max_tokens,
            preemptions=choice.preemptions,
            queue_s=scheduled - arrived,
            prefill_s=first_token - scheduled,
            decode_s=now - first_token,
            e2e_s=now - arrived,
        )


def _is_first_of_request(choice: Choice) -> bool:
    request: Request = choice.request
    return all(c is choice or not c.output_token_ids for c in request.choices)
