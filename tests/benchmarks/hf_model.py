"""The model as transformers runs it by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.benchmarks.figures import Served
from tests.benchmarks.measure import Serve, Start
from tests.benchmarks.plan import Plan, Run
from tests.benchmarks.prompts import Prompt

PAD = 0
"""What shorter prompts are filled up with: masked, so any token does."""

Generate = Callable[[Any, Sequence[Prompt], int], list[Served]]
"""Takes the model, prompts and how many tokens each is to get."""


def load(plan: Plan) -> Any:
    """With the attention transformers chooses."""
    torch.set_num_threads(plan.threads)
    model = AutoModelForCausalLM.from_pretrained(
        plan.folder, dtype=getattr(torch, plan.dtype), local_files_only=True
    )
    # Its own settings would end at the end of sequence, wherever a call says nothing else.
    model.generation_config = greedy()
    return model.eval()


def greedy(eos_token_id: int | None = None) -> GenerationConfig:
    """The likeliest tokens, and past the end of sequence unless one is named."""
    return GenerationConfig(do_sample=False, eos_token_id=eos_token_id, pad_token_id=PAD)


def in_batches(generate: Generate) -> Start:
    """Serves a run with calls of `generate`, each with as many prompts as there are users."""

    @contextmanager
    def start(plan: Plan) -> Iterator[Serve]:
        model = load(plan)

        def serve(run: Run) -> list[Served]:
            users, prompts = run.workload.users, run.prompts
            batches = [prompts[i : i + users] for i in range(0, len(prompts), users)]
            return [s for b in batches for s in generate(model, b, run.workload.new_tokens)]

        yield serve

    return start
