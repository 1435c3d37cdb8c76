"""A decode or prefill problem as peers without a block table want it, and torch's SDPA on it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from tests.gpu_check.paged import PagedProblem


def dense(problem: PagedProblem, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query `[B, Hq, L, D]`, keys and values `[B, Hkv, S, D]`; all segments must be alike."""
    batch, length = len(problem.spans), problem.spans[0][1]
    query = problem.queries[layer].unflatten(0, (batch, length)).transpose(1, 2).contiguous()
    rows = [problem.contiguous(layer, row) for row in range(batch)]
    keys, values = (
        torch.stack(part).transpose(1, 2).contiguous() for part in zip(*rows, strict=True)
    )
    return query, keys.to(problem.dtype), values.to(problem.dtype)


def token_major(output: Tensor) -> Tensor:
    """`[B, Hq, L, D]` -> `[B, L, Hq, D]`, a view."""
    return output.transpose(1, 2)


def sdpa(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """`[B, Hq, L, D]`; the last query is at the last key. A chunk behind a context wants keys of
    as many heads as queries have."""
    length, seen = query.shape[2], keys.shape[2]
    chunk = 1 < length < seen
    return F.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=causal_lower_right(length, seen) if chunk else None,
        is_causal=length == seen > 1,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )


def sdpa_calls(problem: PagedProblem) -> list[Callable[[], Tensor]]:
    """One a turn, over contiguous keys and values: what gathering them took is not counted, nor
    what repeating them for a chunk's heads did."""
    calls = []
    for layer in range(problem.turns):
        query, keys, values = dense(problem, layer)
        if 1 < query.shape[2] < keys.shape[2]:
            group = query.shape[1] // keys.shape[1]
            keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))

        def call(q: Tensor = query, k: Tensor = keys, v: Tensor = values) -> Tensor:
            return token_major(sdpa(q, k, v, problem.scale))

        calls.append(call)
    return calls
