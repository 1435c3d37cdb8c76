"""How large indices get: a model of the arithmetic on the largest device and the largest steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.kernels.aot.intervals import Interval
from tests.kernels.aot.offsets import Bounds

if TYPE_CHECKING:
    from kernels.gpu.launch import Launch

POOL_BYTES = 141 * 10**9
"""All of an H200's memory."""
CONTEXT = 1 << 24
"""Tokens of one choice; more than any model has."""
TOKENS = 1 << 18
"""Of a step: the most that `max_num_batched_tokens` may be."""
STAND_IN = 16
"""Times the heads or columns of a listed variant that others may have which it stands for: rows are
taken to be that many more."""
MOST_HEADS = 1 << 10
ROWS = 1 << 12
"""Of a batch: the most that `max_num_seqs` may be."""
ITEMS = 1 << 24
"""Work items of a plan: all rows with 2^20 tokens, in chunks of 256."""
BLOCK_WORDS = 1 << 27
"""Of 8 bytes each in one block of the pool, over all layers: 1 GiB."""
SMALLEST_BLOCK = 16
"""Tokens."""
WIDTH = 1 << 17
"""Columns of a gated MLP's hidden rows."""
VOCABULARY = 1 << 18
"""Tokens: the most that `sample` takes."""
SMALLEST_SEGMENT = 1024
"""Tokens of a vocabulary that a program takes, at the least."""
EDITS = 1 << 24
"""Changes of single scores in a step."""
LAST_31_BIT = (1 << 31) - 1

ITEM_BYTES = {"*bf16": 2, "*fp16": 2, "*fp8e4nv": 1, "*fp32": 4, "*i64": 8}


def bounds_of(launch: Launch) -> Bounds:
    """For a launch of any listed op.

    Raises:
        KeyError: the op has no model here. Write one: without it nothing says what is in range.
    """
    return MODELS[launch.op](launch)


def pool_blocks(launch: Launch, pointer: str) -> Interval:
    """Ids of blocks where the whole memory is a pool of the launch's strides."""
    block_bytes = launch.constants["BLOCK_STRIDE"] * ITEM_BYTES[launch.types[pointer]]
    return Interval(0, POOL_BYTES // block_bytes)


def _table_stride() -> Interval:
    return Interval(1, CONTEXT // SMALLEST_BLOCK)


def _decode(launch: Launch) -> Bounds:
    return Bounds(
        scalars={"table_stride": _table_stride()},
        loads={
            "block_table": pool_blocks(launch, "key_blocks"),
            "items": Interval(0, max(ITEMS, CONTEXT)),
            "n_items": Interval(0, ITEMS),
        },
        grid=(MOST_HEADS, ITEMS, 1),
    )


def _merge(launch: Launch) -> Bounds:
    return Bounds(
        scalars={},
        loads={"row_parts": Interval(0, ITEMS)},
        grid=(ROWS * STAND_IN, MOST_HEADS, 1),
    )


def _prefill(launch: Launch) -> Bounds:
    return Bounds(
        scalars={"table_stride": _table_stride(), "window": Interval(0, CONTEXT)},
        loads={
            "block_table": pool_blocks(launch, "key_blocks"),
            "seq_lens": Interval(0, CONTEXT),
            "cu_q": Interval(0, TOKENS * STAND_IN),
            "tiles": Interval(0, TOKENS),
        },
        grid=(MOST_HEADS, TOKENS, 1),
    )


def _kv_write(launch: Launch) -> Bounds:
    blocks = pool_blocks(launch, "key_blocks")
    return Bounds(
        scalars={},
        loads={"slots": Interval(-1, (blocks.high + 1) * launch.constants["BLOCK_SIZE"] - 1)},
        grid=(TOKENS * STAND_IN, MOST_HEADS, 1),
    )


def _rows(launch: Launch) -> Bounds:
    chunk = launch.constants.get("CHUNK", WIDTH)
    return Bounds(scalars={}, loads={}, grid=(TOKENS * STAND_IN, WIDTH // chunk, 1))


def _copy(launch: Launch) -> Bounds:
    chunks = -(-BLOCK_WORDS // launch.constants["CHUNK"])
    blocks = pool_blocks(launch, "pool")
    return Bounds(
        scalars={"n_pairs": Interval(0, 1024)} if "n_pairs" in launch.types else {},
        loads={"ids": blocks, "pairs": blocks},
        grid=(chunks, chunks, 1),
    )


def _sample(launch: Launch) -> Bounds:
    ids = Interval(0, VOCABULARY)
    lists = ("listed", "num_listed", "interval", "counts", "peak_ids", "winners", "top_ks")
    return Bounds(
        scalars={}, loads=dict.fromkeys(lists, ids), grid=(ROWS, VOCABULARY // SMALLEST_SEGMENT, 1)
    )


def _allow_only(launch: Launch) -> Bounds:
    chunks = VOCABULARY // launch.constants["CHUNK"]
    return Bounds(scalars={}, loads={"rows": Interval(-1, ROWS - 1)}, grid=(ROWS, chunks, 1))


def _edit_scores(launch: Launch) -> Bounds:
    return Bounds(
        scalars={"n_edits": Interval(0, EDITS)},
        loads={"rows": Interval(-1, ROWS - 1), "token_ids": Interval(-1, LAST_31_BIT)},
        grid=(EDITS // launch.constants["CHUNK"], 1, 1),
    )


SAMPLING = ("peaks", "bins", "interval", "candidates", "threshold", "race", "pick")
MODELS: dict[str, Callable[[Launch], Bounds]] = {
    "attn_decode": _decode,
    "attn_merge": _merge,
    "attn_prefill": _prefill,
    "kv_write": _kv_write,
    "rms_norm": _rows,
    "silu_mul": _rows,
    "block_copy": _copy,
    "block_gather": _copy,
    "block_scatter": _copy,
    "allow_only": _allow_only,
    "edit_scores": _edit_scores,
    **{f"sample_{step}": _sample for step in SAMPLING},
}
