"""transformers' `generate_batch`, its continuous batching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from transformers import ContinuousBatchingConfig

from replicas.config import EngineConfig
from tests.benchmarks import hf_model
from tests.benchmarks.figures import Served
from tests.benchmarks.measure import measure
from tests.benchmarks.plan import Plan, Say
from tests.benchmarks.prompts import Prompt

_NO_EOS = -1
"""How it is told to go past the end of sequence."""


def generate(model: Any, prompts: Sequence[Prompt], new_tokens: int) -> list[Served]:
    """All prompts in one call, with blocks and a token budget like ours.

    It is told how many blocks it needs: by itself it would fill most of the memory.
    """
    ours = EngineConfig()
    blocks = sum(math.ceil((len(p.token_ids) + new_tokens) / ours.block_size) for p in prompts)
    results = model.generate_batch(
        [list(p.token_ids) for p in prompts],
        generation_config=hf_model.greedy(_NO_EOS),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=ours.block_size,
            num_blocks=blocks + len(prompts),
            max_batch_tokens=ours.max_num_batched_tokens,
        ),
        max_new_tokens=new_tokens,
        record_timestamps=True,
    )
    return [
        Served(r.created_time, r.timestamps[0], r.timestamps[-1], len(r.generated_tokens))
        for r in results.values()
    ]


def report(plan: Plan, say: Say) -> dict[str, Any]:
    return measure(hf_model.in_batches(generate), plan, say)
