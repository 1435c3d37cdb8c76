"""torch's flex_attention over contiguous keys and values, compiled for each shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tests.gpu_check.contiguous import dense, token_major
from tests.gpu_check.paged import PagedProblem
from tests.gpu_check.peer_bench import beside_ours
from tests.gpu_check.rig import Rig


def run(rig: Rig) -> None:
    # Uncompiled it computes the same slowly: enough for a dry run.
    attend = flex_attention if rig.dry else torch.compile(flex_attention, dynamic=False)

    def make(problem: PagedProblem) -> list[Callable[[], Tensor]]:
        (start, length), *_ = problem.spans
        mask = _mask(length, start + length, problem.device)

        def call(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            output = attend(
                query, keys, values, block_mask=mask, scale=problem.scale, enable_gqa=True
            )
            return token_major(output)

        return [partial(call, *dense(problem, layer)) for layer in range(problem.turns)]

    with torch.no_grad():
        beside_ours(rig, "flex_attention", make, make)


def _mask(length: int, seen: int, device: str) -> BlockMask | None:
    if length == 1:
        return None
    offset = seen - length

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + offset >= key

    return create_block_mask(causal, None, None, length, seen, device=device)
