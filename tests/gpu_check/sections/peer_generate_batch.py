"""transformers' own continuous batching on the model that our engine is measured on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tests.gpu_check.engine_bench import prompt
from tests.gpu_check.items import ENGINE_SPEED
from tests.gpu_check.model_sizes import SIZE_8B, SIZE_DRY, Size
from tests.gpu_check.peer import report_rate
from tests.gpu_check.rig import Rig

_TOKENS = 64
"""Of each choice."""


def run(rig: Rig) -> None:
    """Decoding a batch, then decoding alone."""
    size = SIZE_DRY if rig.dry else SIZE_8B
    context, many = (30, 3) if rig.dry else (1024, 64)
    model = _model(rig, size)
    for item, batch in ((ENGINE_SPEED[1], many), (ENGINE_SPEED[0], 1)):
        prompts = [list(prompt(size, context, seed)) for seed in range(batch)]
        report_rate(rig, item, "generate_batch", partial(_rate, rig, model, prompts))


def _model(rig: Rig, size: Size) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(rig.device):
        model = AutoModelForCausalLM.from_config(
            size.config(),
            dtype=torch.float32 if rig.dry else torch.bfloat16,
            attn_implementation="sdpa",
        )
    return model.eval().requires_grad_(False)


def _rate(rig: Rig, model: Any, prompts: Sequence[list[int]]) -> float:
    """Tokens a second while all decode."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    # Left alone it takes most of the memory there is, which a CPU would fill for half a minute.
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, page_size=16)
    answers = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=8 if rig.dry else _TOKENS,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        ),
        continuous_batching_config=small if rig.dry else None,
        record_timestamps=True,
    )
    if len(answers) != len(prompts):
        raise ValueError(f"{len(answers)} of {len(prompts)} prompts were answered")
    return decoding_rate([answer.timestamps for answer in answers.values()])


def decoding_rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens a second from when the last choice had its first token until the first had its last,
    by the seconds at which each choice got its tokens."""
    begin = max(each[0] for each in times)
    end = min(each[-1] for each in times)
    if begin >= end:
        raise ValueError("at no time did all of them decode")
    return sum(begin < moment <= end for each in times for moment in each) / (end - begin)
