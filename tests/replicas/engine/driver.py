"""Drives an engine and keeps what the client of every choice has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from replicas.config import EngineConfig
from replicas.core.request import ChoiceKey
from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler_output import StepOutcome
from replicas.engine.engine import Engine, MakeRunner
from replicas.engine.host_memory import MakeCopier, OpenStore
from replicas.host_store import InProcessStore
from replicas.models.hf_adapter import PagedModel
from replicas.protocol import FinishReason, GenerateRequest, Receipt, TokenLogprobs

LOGPROB_TOLERANCE = 1e-4

DEPTH = 1
"""Steps in flight of engines that `make_engine` is not told otherwise; see the fixture `depth`."""

BOTH_DEPTHS = pytest.mark.usefixtures("depth")
"""On a CPU a step is computed when it is launched; its results are taken as late as on a GPU."""
ONE_STEP = pytest.mark.parametrize("depth", [1], indirect=True, ids=["one step"])
"""For tests of what is in which step, where the others of a module run at both depths."""


@dataclass(slots=True)
class Answer:
    """All deltas of one choice."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    receipt: Receipt | None = None

    @property
    def took(self) -> Receipt:
        """The receipt of a choice that has ended."""
        assert self.receipt is not None
        return self.receipt


Answers = dict[ChoiceKey, Answer]


def make_engine(
    model: PagedModel,
    *,
    host_blocks: int = 0,
    open_store: OpenStore | None = None,
    make_copier: MakeCopier | None = None,
    make_runner: MakeRunner | None = None,
    depth: int | None = None,
    **config: Any,
) -> Engine:
    """An engine on the CPU: a roomy pool and small chunks, and all that fits is admitted, unless
    `config` says otherwise. `host_blocks` of this process' memory are its host tier."""
    defaults = {
        "block_size": 8,
        "num_gpu_blocks_override": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 48,
        "admission": "eager",
    }
    if host_blocks:
        defaults["swap_space"] = 1.0
        open_store = partial(_in_process, host_blocks)
    return Engine(
        EngineConfig(**(defaults | config)),
        model,
        "cpu",
        open_store=open_store,
        make_copier=make_copier,
        make_runner=make_runner,
        depth=depth or DEPTH,
    )


def _in_process(host_blocks: int, identity: bytes, block_bytes: int) -> InProcessStore:
    return InProcessStore(host_blocks, block_bytes)


def ask(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 16,
    *,
    n: int = 1,
    priority: int = 0,
    cache_salt: str = "",
    temperature: float = 0.0,
    seed: int = 7,
    ignore_eos: bool = True,
    **sampling: Any,
) -> GenerateRequest:
    """A request: greedy and of exactly `max_tokens`, unless told otherwise."""
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(
            max_tokens, seed, temperature=temperature, ignore_eos=ignore_eos, **sampling
        ),
        n=n,
        priority=priority,
        cache_salt=cache_salt,
    )


class Client:
    """Steps an engine; checks its books after every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: Answers = {}
        self.first_token_s: list[float] = []
        self.num_finished = 0

    def send(self, *requests: GenerateRequest) -> None:
        for request in requests:
            self.engine.add(request)
            self.answers.update({(request.request_id, i): Answer() for i in range(request.n)})

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self._take(self.engine.abort(request_id, choice))
        self.engine.check_integrity()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._take(self.engine.step())
            self.engine.check_integrity()

    def run(self) -> Answers:
        """Step until nothing is left to do; nothing may stay behind."""
        while self.engine.has_work:
            self.step()
        snapshot = self.engine.snapshot()
        assert self.engine.live_request_ids() == []
        assert (snapshot.running, snapshot.waiting, snapshot.pending_tokens) == (0, 0, 0)
        assert snapshot.used_blocks == snapshot.copies == snapshot.pinned_host_blocks == 0
        assert all(answer.finish_reason for answer in self.answers.values())
        return self.answers

    def _take(self, outcome: StepOutcome) -> None:
        self.first_token_s += outcome.first_token_s
        self.num_finished += len(outcome.finished)
        for delta in outcome.deltas:
            answer = self.answers[delta.request_id, delta.choice]
            assert answer.finish_reason is None, f"a delta after the end: {delta}"
            if delta.prompt_logprobs is not None:
                assert not answer.token_ids
                answer.prompt_logprobs = delta.prompt_logprobs
            answer.token_ids += delta.token_ids
            answer.logprobs += delta.logprobs
            answer.finish_reason = delta.finish_reason
            answer.stop_token_id = delta.stop_token_id
            answer.receipt = delta.receipt


def serve(engine: Engine, *requests: GenerateRequest) -> Answers:
    """What `requests`, sent at once, are answered."""
    client = Client(engine)
    client.send(*requests)
    return client.run()


def tokens(answers: Answers) -> dict[ChoiceKey, list[int]]:
    """What differs between two runs is easiest to see in the tokens alone."""
    return {key: answer.token_ids for key, answer in answers.items()}


def assert_same(actual: Answers, expected: Answers) -> None:
    """Equal tokens and ends, and logprobs equal but for rounding."""
    assert tokens(actual) == tokens(expected)
    for key, answer in actual.items():
        assert answer.finish_reason == expected[key].finish_reason
        assert_close(answer.logprobs, expected[key].logprobs)
        assert_close(answer.prompt_logprobs or (), expected[key].prompt_logprobs or ())


def assert_close(actual: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    """Equal logprobs of the same tokens, but for rounding."""
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=LOGPROB_TOLERANCE)
        assert ours.rank == theirs.rank
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert [value for _, value in ours.top] == pytest.approx(
            [value for _, value in theirs.top], abs=LOGPROB_TOLERANCE
        )
