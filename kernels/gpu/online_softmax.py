"""What decode and prefill attention share: reading a tile of the pool and softmax by tiles.

The rules: scores are in the log2 domain, hidden ones a finite -1e30 (an infinity would give NaN
where a row has seen nothing yet), and their weights are set to zero as well. Loads are masked by
position, so that NaN in a slot which nobody has written does no harm.
"""

from __future__ import annotations

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1.0e30)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_blocks(
    table: tl.tensor, start: tl.tensor, end: tl.tensor, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Block ids of the tokens `start` .. `start + TILE - 1`, int64: a scalar where they lie in one
    block, else one a token. `start` is a multiple of TILE; nothing is read from `end` on.

    Loops carry the next tile's ids: loaded where they are used, they keep Triton from copying
    tiles ahead.
    """
    if TILE > BLOCK_SIZE:
        tokens = start + tl.arange(0, TILE)
        return tl.load(table + tokens // BLOCK_SIZE, mask=tokens < end, other=0).to(tl.int64)
    else:  # noqa: RET505 (a branch at compile time)
        return tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0).to(tl.int64)


@triton.jit
def tile_pointers(
    pool: tl.tensor,
    blocks: tl.tensor,
    start: tl.tensor,
    BLOCK_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:
    """`[TILE, DIM]` pointers to the slots of a tile, from `tile_blocks`."""
    slots = tl.arange(0, TILE)
    dims = tl.arange(0, DIM)
    if TILE > BLOCK_SIZE:
        rows = pool + blocks * BLOCK_STRIDE + (slots % BLOCK_SIZE) * SLOT_STRIDE
        return rows[:, None] + dims[None, :]
    else:  # noqa: RET505 (a branch at compile time)
        first = pool + blocks * BLOCK_STRIDE + (start % BLOCK_SIZE) * SLOT_STRIDE
        return first + (slots[:, None] * SLOT_STRIDE + dims[None, :])


@triton.jit
def tile_scores(
    query: tl.tensor, keys: tl.tensor, scale: tl.tensor, cap: tl.tensor, CAPPED: tl.constexpr
) -> tl.tensor:
    """`[rows, TILE]` scores in the log2 domain of `query` `[rows, DIM]` and `keys` `[TILE, DIM]`,
    scaled after the product; capped as cap * tanh(x / cap), tanh(y) = 1 - 2 / (exp(2 y) + 1)."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if CAPPED:
        exponential = tl.exp2(scores * (scale * (2.0 * LOG2_E) / cap))
        return (1.0 - 2.0 / (exponential + 1.0)) * (cap * LOG2_E)
    else:  # noqa: RET505 (a branch at compile time)
        return scores * (scale * LOG2_E)


@triton.jit
def absorb_tile(
    scores: tl.tensor,
    seen: tl.tensor,
    values: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Take a tile into the running softmax: `highest` score and `total` weight `[rows]`, `mixed`
    values `[rows, DIM]`. `seen` `[rows, TILE]` is used where MASKED."""
    if MASKED:
        scores = tl.where(seen, scores, HIDDEN)
    raised = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - raised[:, None])
    if MASKED:
        weights = tl.where(seen, weights, 0.0)
    kept = tl.exp2(highest - raised)
    total = total * kept + tl.sum(weights, 1)
    mixed = mixed * kept[:, None]
    mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision="ieee")
    return raised, total, mixed
