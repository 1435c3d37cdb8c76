"""Rows to sample, as the engine describes them to the device and to the CPU's sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from replicas.core.sampling_params import SamplingParams
from replicas.engine.device_sampler import TritonSampler
from replicas.engine.logit_processors import SampleRow
from tests.gpu_check.rig import Rig

EVERYTHING = SamplingParams(
    9,
    17,
    temperature=0.9,
    top_p=0.95,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias=((3, 1.5), (40, -2.0)),
    allowed_token_ids=tuple(range(0, 90, 3)),
)
"""All that can be done to logits."""


def rows_of(sampling: SamplingParams, count: int) -> list[SampleRow]:
    """Draws with noise of their own, and histories of their own where these matter."""
    return [
        SampleRow(
            sampling=sampling,
            choice=index % 3,
            output_index=index,
            prompt_token_ids=(1, 3, 6, 6, 50 + index % 7),
            output_token_ids=(9, 9, 12 + index % 5, 3),
        )
        for index in range(count)
    ]


def draw_call(
    rig: Rig, logits: Tensor, sampling: SamplingParams, sampler: TritonSampler
) -> Callable[[], Tensor]:
    """A call that draws a token for each row of `logits` [B, V]; they change where `sampling`
    changes logits. What it needs is on the device already."""
    arrays = sampler.arrays(rows_of(sampling, len(logits)))
    tensors = {name: torch.from_numpy(array).to(rig.device) for name, array in arrays.items()}
    return partial(sampler.draw, logits, tensors)


def draw(rig: Rig, logits: Tensor, sampling: SamplingParams) -> Tensor:
    """[B] int64: the device's tokens for `logits` [B, V], which stay as they are."""
    sampler = TritonSampler(logits.shape[1], (), rig.device)
    return draw_call(rig, logits.clone(), sampling, sampler)()


def draw_from(rig: Rig, vocabulary: int) -> Tensor:
    """A draw with all that may go before it; only that it happens matters."""
    return draw(rig, torch.zeros(1, vocabulary, device=rig.device), EVERYTHING)


def bench_calls(rig: Rig, logits: Sequence[Tensor]) -> dict[str, list[Callable[[], Tensor]]]:
    """By kind of sampling, one call for each of `logits` [B, V]."""
    kinds = {
        "greedy": SamplingParams(1, 7, temperature=0.0),
        "temperature": SamplingParams(1, 7, temperature=0.8),
        "top-p 0.9": SamplingParams(1, 7, temperature=0.8, top_p=0.9),
    }
    sampler = TritonSampler(logits[0].shape[1], (), rig.device)
    return {
        kind: [draw_call(rig, each, sampling, sampler) for each in logits]
        for kind, sampling in kinds.items()
    }
