"""Which index products leave 31 bits on a device with 141 GB, and what kernels are told of it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kernels.model_shapes import MODELS, ModelShape
from tests.kernels.aot import bounds
from tests.kernels.aot.bounds import (
    BLOCK_WORDS,
    CONTEXT,
    ITEMS,
    LAST_31_BIT,
    POOL_BYTES,
    ROWS,
    SMALLEST_BLOCK,
    TOKENS,
    VOCABULARY,
)

BLOCK_SIZES = (16, 32, 64, 128)
LAYERS = 126
"""Of the deepest model, Llama 3.1 405B."""


def products(model: ModelShape, block_size: int, item_bytes: int) -> Mapping[str, int]:
    """The most that each product of the kernels' index arithmetic reaches, in elements."""
    width = max(model.head_dim, model.value_dim or 0)
    block_stride = LAYERS * 2 * model.kv_heads * block_size * width
    blocks = POOL_BYTES // (block_stride * item_bytes)
    return {
        "block * BLOCK_STRIDE": blocks * block_stride,
        "row * table_stride": ROWS * (CONTEXT // SMALLEST_BLOCK),
        "token * QUERY_TOKEN_STRIDE": TOKENS * (model.heads + 2 * model.kv_heads) * width,
        "partial * NUM_HEADS * VALUE_DIM": ITEMS * model.heads * width,
        "block * words of a block": POOL_BYTES // 8,
        "kv_head * HEAD_STRIDE": model.kv_heads * block_size * width,
        "slot in a block * SLOT_STRIDE": block_size * width,
        "head * QUERY_HEAD_STRIDE": model.heads * width,
        "item * 4": ITEMS * 4,
        "token // BLOCK_SIZE": CONTEXT // block_size,
        "word of a block": BLOCK_WORDS,
        "row * VOCAB_STRIDE": ROWS * VOCABULARY,
    }


MUST_BE_WIDE = {
    "block * BLOCK_STRIDE",
    "row * table_stride",
    "partial * NUM_HEADS * VALUE_DIM",
    "block * words of a block",
}
"""For every model and block size."""
WIDE_FOR_SOME = {"token * QUERY_TOKEN_STRIDE"}
MAY_BE_NARROW = {
    "kv_head * HEAD_STRIDE",
    "slot in a block * SLOT_STRIDE",
    "head * QUERY_HEAD_STRIDE",
    "item * 4",
    "token // BLOCK_SIZE",
    "word of a block",
    "row * VOCAB_STRIDE",
}


def every_product(name: str) -> list[int]:
    return [
        products(model, block_size, item_bytes)[name]
        for model in MODELS
        for block_size in BLOCK_SIZES
        for item_bytes in (1, 2)
    ]


def test_every_product_is_judged() -> None:
    judged = MUST_BE_WIDE | WIDE_FOR_SOME | MAY_BE_NARROW
    assert judged == set(products(MODELS[0], 64, 2))


@pytest.mark.parametrize("name", sorted(MUST_BE_WIDE))
def test_these_products_leave_31_bits_with_every_model(name: str) -> None:
    assert min(every_product(name)) > LAST_31_BIT


@pytest.mark.parametrize("name", sorted(WIDE_FOR_SOME))
def test_these_products_leave_31_bits_with_some_model(name: str) -> None:
    assert min(every_product(name)) <= LAST_31_BIT < max(every_product(name))


@pytest.mark.parametrize("name", sorted(MAY_BE_NARROW))
def test_these_products_fit_with_every_model(name: str) -> None:
    assert max(every_product(name)) <= LAST_31_BIT


def test_every_listed_op_has_bounds() -> None:
    from kernels.variants import TARGETS, variants

    ops = {launch.op for arch in TARGETS for launch in variants(arch)}
    assert ops == set(bounds.MODELS)


def test_bounds_name_arguments_of_their_kernels() -> None:
    from kernels.variants import variants

    for launch in variants(90):
        known = bounds.bounds_of(launch)
        scalars = {name for name, kind in launch.types.items() if not kind.startswith("*")}
        assert set(known.scalars) <= scalars, launch.op


def test_a_pool_of_the_whole_memory_bounds_block_ids() -> None:
    from kernels.variants import variants

    for launch in variants(90):
        if "BLOCK_STRIDE" in launch.constants and launch.op.startswith("attn"):
            ids = bounds.bounds_of(launch).loads["block_table"]
            assert ids.high * launch.constants["BLOCK_STRIDE"] > LAST_31_BIT


def test_a_variant_stands_for_no_more_heads_than_its_bounds_allow_for() -> None:
    for head_dim in {model.head_dim for model in MODELS}:
        heads = [model.heads for model in MODELS if model.head_dim == head_dim]
        assert max(heads) <= min(heads) * bounds.STAND_IN
        assert max(heads) <= bounds.MOST_HEADS
