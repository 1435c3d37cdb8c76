"""Whether our engine computes what transformers does: else its speed is of no interest."""

from __future__ import annotations

from typing import Any

import torch

from tests.benchmarks import hf_model
from tests.benchmarks.closed_loop import drive
from tests.benchmarks.columns.in_process import OurEngine
from tests.benchmarks.plan import Plan, Say


def report(plan: Plan, say: Say) -> dict[str, Any]:
    """Compares the greedy tokens of the plan's only run, in float32.

    Raises:
        RuntimeError: some differ.
    """
    (run,) = plan.runs
    count = run.workload.new_tokens
    say(f"{len(run.prompts)} prompts through our engine")
    engine = OurEngine(plan)
    drive(engine, run)
    say("the same through transformers, one at a time")
    model = hf_model.load(plan)
    for number, prompt in enumerate(run.prompts):
        output = model.generate(torch.tensor([prompt.token_ids]), max_new_tokens=count)
        wanted = output[0, len(prompt.token_ids) :].tolist()
        got = engine.token_ids[str(number)]
        if got != wanted:
            raise RuntimeError(f"prompt {number}: transformers gives {wanted}, our engine {got}")
    return {"prompts": len(run.prompts), "new_tokens": count}
