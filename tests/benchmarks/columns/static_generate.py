"""transformers' `generate` on padded batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from tests.benchmarks import hf_model
from tests.benchmarks.figures import Served
from tests.benchmarks.measure import measure
from tests.benchmarks.plan import Plan, Say
from tests.benchmarks.prompts import Prompt


class _StepTimes(StoppingCriteria):
    """Never stops anything: `generate` asks it after each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, _scores: Any, **_: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def generate(model: Any, prompts: Sequence[Prompt], new_tokens: int) -> list[Served]:
    """All prompts in one batch, padded on the left to the longest."""
    sent = time.perf_counter()
    width = max(len(p.token_ids) for p in prompts)
    padding = [width - len(p.token_ids) for p in prompts]
    input_ids = torch.tensor(
        [[hf_model.PAD] * pad + list(p.token_ids) for pad, p in zip(padding, prompts, strict=True)]
    )
    mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).long()
    steps = _StepTimes()
    output = model.generate(
        input_ids, attention_mask=mask, max_new_tokens=new_tokens, stopping_criteria=[steps]
    )
    tokens = output.shape[1] - width
    return [Served(sent, steps.times[0], steps.times[-1], tokens)] * len(prompts)


def report(plan: Plan, say: Say) -> dict[str, Any]:
    return measure(hf_model.in_batches(generate), plan, say)
