"""One engine under one load with too little KV: what is configured, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from replicas.config import EngineConfig
from replicas.core.sampling_params import SamplingParams
from replicas.engine.engine import Engine
from replicas.host_store import InProcessStore
from replicas.models.hf_adapter import PagedModel
from replicas.protocol import GenerateRequest, TokenDelta
from tests.benchmarks.prompts import Prompt
from tests.benchmarks.workload import Workload

BLOCK_SIZE = 16
"""Tokens: with 64, half of the KV that 264-token choices need is too coarse to be shared out."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that come at once, and the KV tokens there are for them."""

    name: str
    workload: Workload
    kv_tokens: int

    @property
    def needed_tokens(self) -> int:
        """KV tokens that all requests at once would take at their ends."""
        longest = self.workload.own_tokens + self.workload.new_tokens
        return self.workload.requests * longest


@dataclass(frozen=True, slots=True)
class Case:
    """How an engine meets the shortage."""

    mode: str
    policy: str = "last_admitted"
    look_ahead: bool = False

    @property
    def title(self) -> str:
        return f"{self.mode}, {self.policy}, look-ahead {'on' if self.look_ahead else 'off'}"


UNCONSTRAINED = Case("unconstrained")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run."""

    tokens_per_s: float
    preemptions: int
    swaps: int
    recomputed_tokens: int
    restored_tokens: int
    stalls_s: tuple[float, ...]
    """Of each preempted choice, in all."""
    token_ids: tuple[tuple[int, ...], ...]
    """A request's output each: the same in every case."""


def run(
    case: Case, load: Load, model: PagedModel, prompts: Sequence[Prompt], *, swap_gib: float
) -> Outcome:
    """Serve the load with a new engine, greedily and past the end of sequence."""
    engine = _engine(case, load, model, swap_gib)
    workload = load.workload
    sampling = SamplingParams(workload.new_tokens, 0, temperature=0.0, ignore_eos=True)
    outputs: dict[str, list[int]] = {}
    stalls: list[float] = []
    begin = time.perf_counter()
    for index, prompt in enumerate(prompts):
        outputs[str(index)] = []
        engine.add(GenerateRequest(str(index), prompt.token_ids, sampling))
    while engine.has_work:
        for delta in engine.step().deltas:
            outputs[delta.request_id].extend(delta.token_ids)
            stalls += stalls_of(delta)
    seconds = time.perf_counter() - begin
    engine.check_integrity()
    stats = engine.stats
    engine.close()
    return Outcome(
        tokens_per_s=stats.generation_tokens / seconds,
        preemptions=stats.preemptions,
        swaps=stats.swaps,
        recomputed_tokens=stats.recomputed_tokens,
        restored_tokens=stats.restored_tokens,
        stalls_s=tuple(stalls),
        token_ids=tuple(tuple(tokens) for tokens in outputs.values()),
    )


def stalls_of(delta: TokenDelta) -> list[float]:
    """Seconds that a preempted choice stood still in all, if this is its last delta: receipts
    before it know of a part only."""
    receipt = delta.receipt if delta.finish_reason is not None else None
    return [receipt.stall_s] if receipt is not None and receipt.preemptions else []


def _engine(case: Case, load: Load, model: PagedModel, swap_gib: float) -> Engine:
    free = case == UNCONSTRAINED
    tokens = load.needed_tokens + BLOCK_SIZE * load.workload.requests if free else load.kv_tokens
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=-(-tokens // BLOCK_SIZE),
        max_num_seqs=max(64, load.workload.requests),
        preemption_mode="auto" if free else case.mode,  # type: ignore[arg-type]
        preemption_policy=case.policy,  # type: ignore[arg-type]
        admission="look_ahead" if case.look_ahead else "eager",
        swap_space=0.0 if free or case.mode == "recompute" else swap_gib,
    )
    if not config.swap_space:
        return Engine(config, model, "cpu")
    return Engine(
        config,
        model,
        "cpu",
        open_store=lambda _, block_bytes: InProcessStore(
            int(swap_gib * 2**30) // block_bytes, block_bytes
        ),
    )
