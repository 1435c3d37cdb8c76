"""Models with random weights, and an engine driven from outside, as its clients would."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels import dispatch
from replicas.config import EngineConfig
from replicas.core.sampling_params import SamplingParams
from replicas.engine.engine import Engine
from replicas.models import loader
from replicas.models.hf_adapter import PagedModel
from replicas.protocol import GenerateRequest
from tests.gpu_check.model_sizes import Size
from tests.gpu_check.rig import Rig
from tests.gpu_check.timing import synchronize

BLOCK_SIZE = 64


def prompt(size: Size, length: int, seed: int) -> tuple[int, ...]:
    """Token ids, another prompt for each (length, seed)."""
    source = random.Random(f"{length} {seed}")
    return tuple(source.randrange(3, size.vocabulary) for _ in range(length))


def request(name: str, token_ids: Sequence[int], max_tokens: int) -> GenerateRequest:
    """Greedy, and of exactly so many tokens."""
    sampling = SamplingParams(max_tokens, 7, temperature=0.0, ignore_eos=True)
    return GenerateRequest(name, tuple(token_ids), sampling)


def engine_backend(rig: Rig) -> dispatch.KernelBackend:
    """Ours, which then refuse what they cannot do; without a GPU there is only torch's."""
    return "torch" if rig.dry else "triton"


def random_model(rig: Rig, size: Size) -> PagedModel:
    """In bfloat16 for our kernels; a CPU is quicker in float32."""
    dtype = "float32" if rig.dry else "bfloat16"
    return loader.from_config(size.config(), dtype, rig.device, engine_backend(rig))


def make_engine(rig: Rig, model: PagedModel, **config: Any) -> Engine:
    """Without prefix caching: equal prompts are computed each time."""
    defaults = {
        "block_size": 16 if rig.dry else BLOCK_SIZE,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 64 if rig.dry else 2048,
        "enable_prefix_caching": False,
        "admission": "eager",
        "kernel_backend": engine_backend(rig),
    }
    return Engine(EngineConfig(**(defaults | config)), model, rig.device)


@dataclass(slots=True)
class Served:
    """What clients have seen of an engine."""

    engine: Engine
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def send(self, *requests: GenerateRequest) -> None:
        for each in requests:
            self.engine.add(each)
            self.tokens[each.request_id] = []

    def step(self) -> int:
        """One step of the engine; how many tokens it delivered."""
        count = 0
        for delta in self.engine.step().deltas:
            self.tokens[delta.request_id] += delta.token_ids
            count += len(delta.token_ids)
        return count

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    def decoding_s(self, name: str, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Seconds a token of all these takes when all of them decode. Their prompts are over
        before the clock starts, and all end after it has stopped."""
        names = [f"{name} {number}" for number in range(len(prompts))]
        warm_up = tokens // 4 + 1
        spare = len(prompts) + warm_up + 4
        self.send(*(request(n, p, tokens + spare) for n, p in zip(names, prompts, strict=True)))
        while min(len(self.tokens[n]) for n in names) < warm_up:
            self.step()
        synchronize()
        begin, delivered = time.perf_counter(), 0
        while delivered < tokens * len(prompts):
            delivered += self.step()
        synchronize()
        seconds = time.perf_counter() - begin
        for each in names:
            self.engine.abort(each)
        self.finish()
        return seconds / (delivered / len(prompts))

    def prefill_s(self, name: str, token_ids: Sequence[int]) -> float:
        """Seconds from sending a prompt to its first token."""
        synchronize()
        begin = time.perf_counter()
        self.send(request(name, token_ids, 1))
        self.finish()
        return time.perf_counter() - begin
