"""Attention of the rows that have one new token."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.attention_params import AttentionParams
from kernels.decode_plan import DecodeGroup


class BlockReader(Protocol):
    """How the blocks of a `DecodeGroup` are multiplied (`BlockBags`, `BlockTiles`)."""

    def scores(self, query: Tensor, key_blocks: Tensor, scale: float) -> Tensor:
        """`[N, heads, width * block_size]` float32, anything where there is no pair."""

    def mix(self, weights: Tensor, value_blocks: Tensor) -> Tensor:
        """`[N, heads, pool_dim]` float32."""


def attend_decode(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    group: DecodeGroup,
    reader: BlockReader,
    params: AttentionParams,
) -> Tensor:
    """`[N, heads, pool_dim]` float32 for the group's `query` `[N, heads, dim]`.

    Every row sees at least its own token, so no softmax is over nothing.
    """
    scores = reader.scores(query, key_blocks, params.query_scale)
    params.cap(scores)
    scores[..., group.hidden_from :].clamp_max_(group.bound)
    mixed = reader.mix(scores.softmax(-1), value_blocks)
    share = params.sink_share(scores, (query.shape[1],))
    return mixed if share is None else mixed.mul_(share)
