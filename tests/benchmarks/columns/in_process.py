"""Our engine, stepped in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from replicas.config import EngineConfig
from replicas.core.sampling_params import SamplingParams
from replicas.engine.engine import Engine
from replicas.models import loader
from replicas.protocol import FinishReason, GenerateRequest
from tests.benchmarks.closed_loop import Progress, drive
from tests.benchmarks.measure import Serve, measure
from tests.benchmarks.plan import Plan, Say
from tests.benchmarks.prompts import Prompt


class OurEngine:
    """Greedy, and past the end of sequence; the config's defaults otherwise."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(plan.threads)
        model = loader.load(plan.folder, plan.dtype, "cpu")
        self._engine = Engine(EngineConfig(), model, "cpu")
        self.token_ids: dict[str, list[int]] = {}
        """What each request of this engine got; the last one of a name counts."""

    def add(self, request_id: str, prompt: Prompt, new_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=new_tokens, seed=0, temperature=0.0, ignore_eos=True)
        self.token_ids[request_id] = []
        self._engine.add(GenerateRequest(request_id, prompt.token_ids, sampling))

    def step(self) -> Iterable[Progress]:
        progress = []
        for delta in self._engine.step().deltas:
            if delta.finish_reason is FinishReason.ERROR:
                raise RuntimeError(f"request {delta.request_id}: {delta.error}")
            self.token_ids[delta.request_id].extend(delta.token_ids)
            ended = delta.finish_reason is not None
            progress.append(Progress(delta.request_id, len(delta.token_ids), ended))
        return progress


@contextmanager
def start(plan: Plan) -> Iterator[Serve]:
    engine = OurEngine(plan)
    yield lambda run: drive(engine, run)


def report(plan: Plan, say: Say) -> dict[str, Any]:
    return measure(start, plan, say)
