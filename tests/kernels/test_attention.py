"""Every path of `paged_attention` against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cpu_bags, cpu_prefill, torch_attention
from kernels.attention_batch import AttentionBatch, Segment
from tests.kernels.attention_case import AttentionCase, Problem, relative_error

FP32_LIMIT = 1e-5
BF16_LIMIT = 5e-3

BOUNDARIES = [(length - 1, 1) for length in (1, 15, 16, 17, 31, 32, 33, 48)]
MIXED = [(0, 1), (40, 1), (0, 5), (16, 1), (16, 16), (31, 2), (17, 15), (0, 33), (7, 1)]
VARIANTS = {
    "plain": {},
    "window1": {"window": 1},
    "window8": {"window": 8},
    "window16": {"window": 16},
    "window17": {"window": 17},
    "soft_cap": {"soft_cap": 2.0},
    "sinks": {"has_sinks": True},
    "all": {"window": 17, "soft_cap": 3.0, "has_sinks": True},
}


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (8, 2), (7, 1), (8, 1)])
def test_heads_and_widths(heads: int, kv_heads: int, dim: int, transposed: bool) -> None:
    case = AttentionCase(
        [(0, 1), (32, 1), (20, 4)], heads=heads, kv_heads=kv_heads, dim=dim, transposed=transposed
    )
    assert case.build().error() < FP32_LIMIT


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("spans", [BOUNDARIES, MIXED], ids=["decode", "mixed"])
def test_block_sizes(spans: list[tuple[int, int]], block_size: int, transposed: bool) -> None:
    case = AttentionCase(spans, heads=4, block_size=block_size, transposed=transposed)
    assert case.build().error() < FP32_LIMIT


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_windows_caps_and_sinks(options: dict[str, object], transposed: bool) -> None:
    case = AttentionCase(MIXED, heads=6, kv_heads=2, transposed=transposed)
    assert replace(case, **options).build().error() < FP32_LIMIT  # type: ignore[arg-type]


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("dim", "value_dim"), [(24, 16), (16, 24)])
def test_values_of_another_width_than_keys(dim: int, value_dim: int, transposed: bool) -> None:
    case = AttentionCase(MIXED, dim=dim, value_dim=value_dim, transposed=transposed)
    assert case.build().error() < FP32_LIMIT


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("scattered", [True, False])
def test_blocks_shared_by_rows(scattered: bool, transposed: bool) -> None:
    """Several owners of a block (2 to 5), beside blocks of one owner."""
    spans = [(40, 1), (32, 1), (70, 1), (33, 1), (47, 1), (3, 1), (35, 3)]
    case = AttentionCase(spans, shared_blocks=2, scattered=scattered, transposed=transposed)
    assert case.build().error() < FP32_LIMIT


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("window", [None, 24])
def test_rows_of_very_different_lengths(window: int | None, transposed: bool) -> None:
    spans = [(499, 1), *[(length, 1) for length in range(0, 40, 3)], (120, 1)]
    case = AttentionCase(spans, block_size=8, heads=2, window=window, transposed=transposed)
    assert case.build().error() < FP32_LIMIT


@pytest.mark.parametrize("window", [None, 16])
def test_a_sparse_pool_is_gathered_and_a_dense_one_is_not(window: int | None) -> None:
    for spread in (1, 2, 9):
        problem = AttentionCase([(30, 1), (20, 1)], window=window, transposed=False).build()
        segments = [Segment(30, 1, [1, 1 + spread]), Segment(20, 1, [1 + 2 * spread, 40])]
        room = torch.randn(41, *problem.key_blocks.shape[1:])
        moved = replace(problem, segments=segments, key_blocks=room, value_blocks=-room)
        assert moved.error() < FP32_LIMIT


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("options", [VARIANTS["plain"], VARIANTS["all"]], ids=["plain", "all"])
def test_unused_slots_do_not_matter(options: dict[str, object], transposed: bool) -> None:
    case = AttentionCase(MIXED, transposed=transposed, shared_blocks=1)
    case = replace(case, **options)  # type: ignore[arg-type]
    results = [replace(case, poison=poison).build().run() for poison in (1000.0, -1e30, 0.0)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_fresh_memory_does_not_matter(
    pool_dtype: torch.dtype, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and buffers are all written: NaN in them never comes out."""
    case = AttentionCase(MIXED, transposed=transposed, shared_blocks=1, pool_dtype=pool_dtype)
    problem = case.build()
    expected = problem.copy().run()
    poisoned = []

    def full(*size: int, **options: object) -> torch.Tensor:
        poisoned.append(size)
        return torch.full(size, torch.nan, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", full)
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *size: full(*size, dtype=self.dtype)
    )
    assert torch.equal(problem.run(), expected)
    assert poisoned


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_are_bit_equal(dtype: torch.dtype, transposed: bool) -> None:
    case = AttentionCase(MIXED, dtype=dtype, shared_blocks=1, transposed=transposed)
    problem = case.build()
    first = problem.copy().run()
    assert torch.equal(first, problem.copy().run())
    assert torch.equal(first, problem.run())
    assert torch.equal(first, problem.run()), "tokens written twice must be the same"


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_bfloat16_within_the_numerics_contract(
    options: dict[str, object], transposed: bool
) -> None:
    case = AttentionCase(MIXED, dim=64, dtype=torch.bfloat16, transposed=transposed)
    case = replace(case, **options)  # type: ignore[arg-type]
    assert case.build().error() < BF16_LIMIT


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_native_bfloat16_within_the_numerics_contract(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CPU with bfloat16 products does; torch emulates them elsewhere."""
    monkeypatch.setattr(torch_attention, "compute_dtype", lambda query, _blocks: query.dtype)
    case = AttentionCase(MIXED, dim=64, dtype=torch.bfloat16, shared_blocks=1)
    case = replace(case, **options)  # type: ignore[arg-type]
    assert case.build().error() < BF16_LIMIT


@pytest.mark.parametrize(("native", "allowed"), [(False, 1.5), (True, 2.0)])
def test_bfloat16_beside_flash_attention(
    native: bool, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.bmm` rounds its scores to bfloat16, flash attention keeps them in float32: with
    native products 1.65 of its error was seen, without 0.9."""
    dtype = torch.bfloat16 if native else torch.float32  # whatever this machine would take
    monkeypatch.setattr(torch_attention, "compute_dtype", lambda _query, _blocks: dtype)
    problem = AttentionCase(
        [(0, 150)], heads=4, kv_heads=4, dim=64, block_size=64, dtype=torch.bfloat16
    ).build()
    expected = problem.expected()
    flash = F.scaled_dot_product_attention(
        *(tensor.transpose(0, 1)[None] for tensor in (problem.query, problem.key, problem.value)),
        is_causal=True,
    )[0].transpose(0, 1)
    assert relative_error(problem.run(), expected) < allowed * relative_error(flash, expected)


@pytest.mark.parametrize("transposed", [True, False])
def test_float32_model_over_a_bfloat16_pool(transposed: bool) -> None:
    case = AttentionCase(
        MIXED, pool_dtype=torch.bfloat16, transposed=transposed, value_dim=24, shared_blocks=1
    )
    assert case.build().error() < FP32_LIMIT


def test_scattered_bfloat16_pool_is_converted_by_gather() -> None:
    problem = AttentionCase([(20, 1), (9, 1)], pool_dtype=torch.bfloat16).build()
    segments = [Segment(20, 1, [30, 2]), Segment(9, 1, [17])]
    room = torch.randn(31, *problem.key_blocks.shape[1:]).bfloat16()
    keys = torch.empty_like(room.transpose(2, 3)).copy_(room.transpose(2, 3)).transpose(2, 3)
    moved = replace(problem, segments=segments, key_blocks=keys, value_blocks=room)
    assert moved.error() < FP32_LIMIT


def test_a_scattered_float32_pool_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "index_select", _unexpected)
    case = AttentionCase([(30, 1), (20, 1)], block_size=2)
    assert case.build().error() < FP32_LIMIT
    with pytest.raises(AssertionError, match="chosen"):
        replace(case, transposed=False, seed=1).build().run()


def test_a_pool_beyond_int32_is_indexed_with_int64(monkeypatch: pytest.MonkeyPatch) -> None:
    indexed = []
    sums = torch.embedding_bag

    def record(*args: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
        indexed.append(args[1].dtype)
        return sums(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "embedding_bag", record)
    problem = AttentionCase([(30, 1), (20, 1)]).build()
    problem.run()
    rows = problem.segments[0].blocks + problem.segments[1].blocks
    extent = (max(rows) - min(rows) + 1) * 2 * 16
    for limit, dtype in ((extent, torch.int32), (extent - 1, torch.int64)):
        monkeypatch.setattr(cpu_bags, "INT32_ROWS", limit)
        indexed.clear()
        assert problem.error() < FP32_LIMIT
        assert indexed == [dtype, dtype]


@pytest.mark.parametrize(("length", "options"), [(64, {}), (40, {"window": 40})])
def test_long_fresh_prefill_is_flash_attention(
    length: int, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attention, "FLASH_TOKENS", 40)
    monkeypatch.setattr(torch_attention, "attend_tiled", _unexpected)
    assert AttentionCase([(0, length)], heads=8, **options).build().error() < FP32_LIMIT


@pytest.mark.parametrize(
    "options",
    [
        {"window": 63},
        {"soft_cap": 2.0},
        {"has_sinks": True},
        {"value_dim": 8},
        {"spans": [(1, 64)]},
    ],
)
def test_what_flash_attention_cannot_do_is_tiled(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_attention, "FLASH_TOKENS", 40)
    monkeypatch.setattr(torch_attention, "attend_causal", _unexpected)
    case = replace(AttentionCase([(0, 64)]), **options)  # type: ignore[arg-type]
    assert case.build().error() < FP32_LIMIT


def _unexpected(*_: object, **__: object) -> None:
    raise AssertionError("the other kernel should have been chosen")


@pytest.mark.parametrize("most_scores", [1, 2000])
@pytest.mark.parametrize("window", [None, 5, 40])
def test_tiles_of_a_prefill(
    most_scores: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of one token, and tiles of 6 tokens that do not divide the segments."""
    sizes = []
    product = torch.baddbmm

    def record(*args: object, **options: object) -> torch.Tensor:
        scores: torch.Tensor = product(*args, **options)  # type: ignore[call-overload]
        sizes.append(scores.numel())
        return scores

    monkeypatch.setattr(torch, "baddbmm", record)
    monkeypatch.setattr(cpu_prefill, "MOST_SCORES", most_scores)
    case = AttentionCase([(0, 37), (50, 29)], heads=4, window=window)
    assert case.build().error() < FP32_LIMIT
    assert max(sizes) <= max(most_scores, 4 * 79)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("window", [None, 20])
def test_chunks_and_decode_steps_equal_a_whole_prefill(
    window: int | None, transposed: bool
) -> None:
    """Chunks that end on, before and after block boundaries, then decode over one."""
    whole = AttentionCase([(0, 68)], window=window, transposed=transposed).build()
    expected = whole.copy().run()
    start, outputs = 0, []
    for length in (16, 15, 1, 17, 11, 4, 1, 1, 1, 1):
        rows = slice(start, start + length)
        chunk = replace(
            whole,
            segments=[Segment(start, length, whole.segments[0].blocks)],
            query=whole.query[rows],
            key=whole.key[rows],
            value=whole.value[rows],
        )
        outputs.append(chunk.run())
        start += length
    assert start == 68
    assert relative_error(torch.cat(outputs), expected) < 1e-6


def test_one_batch_serves_layers_that_differ() -> None:
    """Windows, caps, head counts and widths may change from layer to layer."""
    base = AttentionCase(MIXED)
    layers = [
        base,
        replace(base, window=8),
        replace(base, heads=8, kv_heads=4),
        replace(base, value_dim=24),
        replace(base, dim=24),
        replace(base, window=16, has_sinks=True),
        replace(base, transposed=False),
        replace(base, pool_dtype=torch.bfloat16),
        base,
    ]
    problems: list[Problem] = [layer.build() for layer in layers]
    batch = AttentionBatch.build(problems[0].segments, base.block_size, "cpu")
    for problem in problems:
        expected = problem.expected()
        assert relative_error(problem.run(batch), expected) < FP32_LIMIT


def test_strided_inputs() -> None:
    """Projections come as views of [heads, T, dim] as well as of [T, heads * dim]."""
    problem = AttentionCase(MIXED).build()
    expected = problem.copy().run()
    strided = replace(
        problem,
        **{
            name: getattr(problem, name).transpose(0, 1).contiguous().transpose(0, 1)
            for name in ("query", "key", "value")
        },
    )
    assert relative_error(strided.run(), expected) < 1e-6


def test_an_empty_step() -> None:
    problem = AttentionCase([(5, 1)]).build()
    nothing = replace(
        problem,
        segments=[],
        query=problem.query[:0],
        key=problem.key[:0],
        value=problem.value[:0],
    )
    before = nothing.copy()
    assert nothing.run().shape == (0, 6, 16)
    assert torch.equal(nothing.key_blocks, before.key_blocks)


@settings(max_examples=100)
@given(data=st.data())
def test_random_steps(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 4, 8, 16, 32]), "block_size")
    span = st.tuples(st.integers(0, 50), st.one_of(st.just(1), st.integers(1, 9)))
    heads, kv_heads = data.draw(st.sampled_from([(2, 2), (4, 1), (3, 1), (4, 2)]), "heads")
    case = AttentionCase(
        data.draw(st.lists(span, min_size=1, max_size=6), "spans"),
        heads=heads,
        kv_heads=kv_heads,
        dim=data.draw(st.sampled_from([8, 16, 20]), "dim"),
        value_dim=data.draw(st.sampled_from([None, 8]), "value_dim"),
        block_size=block_size,
        pool_dtype=data.draw(st.sampled_from([None, torch.bfloat16]), "pool_dtype"),
        transposed=data.draw(st.booleans(), "transposed"),
        scattered=data.draw(st.booleans(), "scattered"),
        shared_blocks=data.draw(st.integers(0, 3), "shared_blocks"),
        window=data.draw(st.one_of(st.none(), st.integers(1, 40)), "window"),
        soft_cap=data.draw(st.sampled_from([None, 2.0]), "soft_cap"),
        has_sinks=data.draw(st.booleans(), "has_sinks"),
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    problem = case.build()
    assert problem.error() < FP32_LIMIT
