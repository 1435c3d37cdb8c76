"""Random loads on random pools: everybody ends, with the tokens of an undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from replicas.core.preemption.cheapest import Cheapest
from replicas.core.preemption.last_admitted import LastAdmitted
from replicas.core.preemption.preempter import PreemptionMode
from replicas.core.preemption.priority import Priority
from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler import RequestRefusedError
from replicas.protocol import GenerateRequest
from tests.replicas.core.builders import BestRanked, make_request
from tests.replicas.core.harness import Replica

_MAX_COPY_STEPS = 3
_SHARED = tuple((7 * i) % 5 + 1 for i in range(64))
"""Prompts begin with some of these tokens, so that many share a prefix."""


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    """A request without its id."""
    shared = draw(st.integers(0, 24))
    tail = draw(st.lists(st.integers(1, 3), min_size=0 if shared else 1, max_size=12))
    sampling = SamplingParams(
        max_tokens=draw(st.integers(1, 20)),
        seed=draw(st.integers(0, 3)),
        min_tokens=draw(st.sampled_from((0, 0, 5))),
        ignore_eos=draw(st.booleans()),
        presence_penalty=draw(st.sampled_from((0.0, 0.5))),
        prompt_logprobs=draw(st.sampled_from((None, None, 0))),
    )
    return make_request(
        "",
        (*_SHARED[:shared], *tail),
        n=draw(st.integers(1, 4)),
        priority=draw(st.integers(0, 2)),
        salt=draw(st.sampled_from(("", "", "tenant"))),
        sampling=sampling,
    )


class SchedulerMachine(RuleBasedStateMachine):
    """`Replica` checks the rules of every step and the content of every block table."""

    @initialize(
        num_blocks=st.integers(1, 24),
        block_size=st.sampled_from((1, 2, 4, 5)),
        max_num_seqs=st.integers(1, 8),
        budget=st.sampled_from((1, 3, 8, 40)),
        max_model_len=st.sampled_from((20, 10_000)),
        caching=st.booleans(),
        by_priority=st.booleans(),
        min_progress_tokens=st.sampled_from((0, 1, 8)),
        watermark=st.sampled_from((0.0, 0.01, 0.2)),
        policy=st.sampled_from((LastAdmitted(), BestRanked(), Priority(), Cheapest())),
        look_ahead=st.booleans(),
        hysteresis=st.sampled_from((0.0, 0.3)),
        overcommit=st.sampled_from((0.0, 0.5)),
        mode=st.sampled_from(PreemptionMode),
        host_slots=st.sampled_from((0, 1, 3, 50)),
        spill_tokens=st.sampled_from((None, 1, 8)),
        copy_steps=st.sampled_from((0, 0, 1, 3)),
        copy_s=st.sampled_from((1e-4, 1e-4, 1.0)),
        patience=st.sampled_from((1.0, 1e9)),
        depth=st.sampled_from((1, 2)),
    )
    def start(self, **config: Any) -> None:
        self.failing = False
        self.replica = Replica(**config, copy_fails=lambda: self.failing)
        self.arrivals = 0

    @rule(data=requests())
    def arrive(self, data: GenerateRequest) -> None:
        data = replace(data, request_id=f"r{self.arrivals}")
        self.arrivals += 1
        limit = min(self.replica.scheduler.kv.capacity_tokens, self.replica.config.max_model_len)
        if len(data.prompt_token_ids) + 1 > limit:
            with pytest.raises(RequestRefusedError):
                self.replica.submit(data)
        else:
            self.replica.submit(data)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.replica.step()

    @rule(failing=st.booleans())
    def break_or_mend_host_memory(self, failing: bool) -> None:
        self.failing = failing

    @precondition(lambda self: self.arrivals)
    @rule(which=st.integers(0, 1000), index=st.one_of(st.none(), st.integers(0, 3)))
    def abort(self, which: int, index: int | None) -> None:
        self.replica.abort(f"r{which % self.arrivals}", index)

    @precondition(lambda self: self.arrivals)
    @rule(which=st.integers(0, 1000), index=st.one_of(st.none(), st.integers(0, 3)))
    def abort_in_flight(self, which: int, index: int | None) -> None:
        """The client goes while the step is on the device: its result is dropped."""
        self.replica.fill()
        self.replica.abort(f"r{which % self.arrivals}", index)
        self.replica.take()

    @invariant()
    def integrity(self) -> None:
        self.replica.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "replica"):
            self.replica.run(self._bound())

    def _bound(self) -> int:
        """Steps in which all must have ended.

        Each step either appends a token somewhere or takes the leader's prefill on by one
        token at least; the lead changes only where a leader ends or a better one came.
        """
        known = [
            len(data.prompt_token_ids) + data.sampling.max_tokens
            for data in self.replica.requests.values()
            for _ in range(data.n)
        ]
        steps = sum(known) + max(known, default=0) * self.arrivals
        # Between two steps that compute, all may wait for a save, a spill and a restore.
        return 4 * _MAX_COPY_STEPS * steps


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=40)
