"""A step's index arrays, and whole steps through `attend`: ragged, padded, repeated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention_batch import AttentionBatch, Segment
from kernels.gpu.attention import attend
from kernels.gpu.attention_step import AttentionStep, StepArrays, plan_step
from kernels.gpu.attn_prefill import attn_prefill
from kernels.gpu.split_plan import SplitPolicy
from kernels.gpu.tiles import max_items, prefill_tile
from tests.kernels.attention_case import AttentionCase, relative_error
from tests.kernels.gpu.step_case import NAN, StepCase
from tests.kernels.gpu.test_attn_decode import shape

BLOCK = 16
NAMES = ["slots", "block_table", "seq_lens", "cu_q", "tiles"]
NAMES += [f"{name}_{window}" for window in (0, 1) for name in ("items", "n_items", "row_parts")]


@st.composite
def steps(draw: st.DrawFn) -> list[Segment]:
    starts = draw(st.lists(st.integers(0, 900), max_size=12))
    single = draw(st.integers(0, len(starts)))
    lengths = [1] * single + [draw(st.integers(2, 90)) for _ in starts[single:]]
    blocks = iter(range(1, 10_000))
    return [
        Segment(start, length, [next(blocks) for _ in range(-(-(start + length) // BLOCK))])
        for start, length in zip(starts, lengths, strict=True)
    ]


def plan(segments: list[Segment], **options: object) -> StepArrays:
    defaults = {"max_blocks": 64, "tile_tokens": 8, "policy": SplitPolicy(8)}
    return plan_step(segments, BLOCK, (None, 100), **{**defaults, **options})


@given(steps())
def test_arrays_index_the_batch_as_the_other_backend_does(segments: list[Segment]) -> None:
    planned = plan(segments)
    batch = AttentionBatch.build(segments, BLOCK, "cpu")
    arrays = planned.arrays
    assert list(arrays) == NAMES
    assert arrays["slots"].dtype == np.int64
    assert all(arrays[name].dtype == np.int32 for name in NAMES[1:])
    slots = batch.token_blocks * BLOCK + batch.token_offsets
    assert (arrays["slots"] == slots.numpy()).all()
    assert planned.sizes.num_tokens == batch.num_tokens
    assert planned.sizes.num_decode == sum(segment.length == 1 for segment in segments)
    for row, segment in enumerate(segments):
        begin, end = arrays["cu_q"][row : row + 2]
        assert end - begin == segment.length
        assert arrays["seq_lens"][row] == segment.start + segment.length
        table = arrays["block_table"][row]
        assert (table[: len(segment.blocks)] == segment.blocks).all()
        assert (table[len(segment.blocks) :] == 0).all()


@given(steps(), st.integers(1, 50))
def test_query_tiles_cover_each_token_once_the_costliest_first(
    segments: list[Segment], tile_tokens: int
) -> None:
    tiles = plan(segments, tile_tokens=tile_tokens).arrays["tiles"]
    covered = [
        (row, token)
        for row, first in tiles.tolist()
        for token in range(first, min(first + tile_tokens, segments[row].length))
    ]
    expected = [
        (row, token)
        for row, segment in enumerate(segments)
        if segment.length > 1
        for token in range(segment.length)
    ]
    assert sorted(covered) == expected
    ends = [segments[row].start + first for row, first in tiles.tolist()]
    assert ends == sorted(ends, reverse=True)


@given(steps(), st.integers(0, 4), st.booleans())
def test_buckets_have_one_size(segments: list[Segment], spare: int, deterministic: bool) -> None:
    rows = [segment for segment in segments if segment.length == 1]
    bucket = len(rows) + spare
    policy = SplitPolicy(8, deterministic)
    padded = plan(rows, padded_rows=bucket, policy=policy)
    empty = plan([], padded_rows=bucket, policy=policy)
    assert padded.sizes == empty.sizes
    assert padded.sizes.num_decode == padded.sizes.num_tokens == bucket
    exact = plan(rows, policy=policy)
    for name, array in padded.arrays.items():
        assert array.shape == empty.arrays[name].shape
        own = exact.arrays[name]
        assert (array[: len(own)] == own).all(), "the rows that are there are the same"
    for name, filler in (("slots", -1), ("seq_lens", 0), ("block_table", 0)):
        assert (padded.arrays[name][len(rows) :] == filler).all()
    for window in (0, 1):
        parts = padded.arrays[f"row_parts_{window}"]
        assert (parts[len(rows) :] == padded.arrays[f"n_items_{window}"]).all()


def segment(start: int, length: int, blocks: int) -> Segment:
    return Segment(start, length, list(range(1, blocks + 1)))


@pytest.mark.parametrize(
    ("segments", "padded_rows", "message"),
    [
        ([segment(0, 2, 1), segment(0, 1, 1)], None, "one new token come first"),
        ([segment(16, 1, 1)], None, "does not cover"),
        ([segment(0, 1, 65)], None, "longer than 64 blocks"),
        ([segment(0, 0, 1)], None, "at least one new token"),
        ([segment(0, 2, 1)], 4, "segments of one new token each"),
        ([segment(0, 1, 1)] * 5, 4, "up to 4 segments"),
    ],
)
def test_segments_that_do_not_fit_are_refused(
    segments: list[Segment], padded_rows: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(segments, padded_rows=padded_rows)


DECODE = ((69, 1), (0, 1), (290, 1))


def step_case(spans: tuple[tuple[int, int], ...], **options: object) -> StepCase:
    defaults = {"heads": 4, "kv_heads": 2, "dim": 32, "block_size": BLOCK, "poison": NAN}
    return StepCase(AttentionCase(spans, transposed=False, **{**defaults, **options}))


@pytest.mark.parametrize("options", [{}, {"window": 40, "has_sinks": True}], ids=str)
def test_a_padded_step_gives_what_the_unpadded_gives_and_zeros(options: dict[str, object]) -> None:
    case = step_case(DECODE, **options)
    problem = case.problem()
    layer = case.layer(problem)
    expected = case.run(problem, layer)
    assert relative_error(expected, case.expected(problem, layer)) < 1e-5
    padded = case.run(problem, layer, padded_rows=5)
    assert torch.equal(padded[:3], expected)
    assert (padded[3:] == 0).all()


def test_repeats_are_bit_equal() -> None:
    case = step_case((*DECODE, (0, 9), (58, 13)), window=40, soft_cap=3.0)
    problem = case.problem()
    layer = case.layer(problem)
    assert torch.equal(case.run(problem, layer), case.run(problem, layer))


def test_a_query_decodes_to_what_it_is_in_a_prefill() -> None:
    case = step_case(((60, 11),), dtype=torch.float16)
    problem = case.problem()
    layer = case.layer(problem)
    expected = case.expected(problem, layer)
    prefilled = case.run(problem, layer)
    blocks = problem.segments[0].blocks
    decoded = case.run_as(problem, layer, [Segment(60 + token, 1, blocks) for token in range(11)])
    for found in (prefilled, decoded):
        assert relative_error(found, expected) < 1e-3
    assert relative_error(decoded, prefilled) < 1e-3


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_row_is_bit_equal_alone_and_in_a_batch_if_asked_for(deterministic: bool) -> None:
    case = replace(step_case(((290, 1), (299, 1))), policy=SplitPolicy(2, deterministic))
    problem = case.problem()
    layer = case.layer(problem)
    together = case.run(problem, layer)
    alone = case.run_as(problem, layer, problem.segments[:1], slice(0, 1))
    assert relative_error(alone, together[:1]) < 1e-5
    assert torch.equal(alone, together[:1]) == deterministic


def test_a_step_fits_its_layer() -> None:
    case = step_case(DECODE)
    problem = case.problem()
    layer = case.layer(problem)
    step = AttentionStep.on(case.plan(problem.segments), "cpu")
    assert (step.num_decode, step.num_tokens, step.block_size) == (3, 3, BLOCK)
    with pytest.raises(ValueError, match="windows"):
        attend(problem.query, *layer, step, scale=1.0, window=7)
    with pytest.raises(ValueError, match="2 tokens, the step 3"):
        attend(problem.query[:2], *layer, step, scale=1.0)
    with pytest.raises(ValueError, match="block_size is 8"):
        attend(problem.query, layer[0][:, :, :8], layer[1][:, :, :8], step, scale=1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": torch.zeros(9, 4, 16)}, r"output is contiguous \[T, 4, 32\]"),
        ({"output": torch.zeros(9, 4, 32).double()}, "output is torch.float64"),
        ({"tiles": torch.zeros(2, 2)}, "tiles is int32"),
        ({"sinks": torch.zeros(3)}, r"sinks are \[4\]"),
        ({"k_scale": torch.ones(2)}, "v_scale is missing"),
    ],
    ids=["width", "type", "tiles", "sinks", "scales"],
)
def test_prefill_refuses_what_it_cannot_take(
    changes: dict[str, torch.Tensor], message: str
) -> None:
    case = step_case(((0, 9),))
    problem = case.problem()
    keys, values = case.layer(problem)
    arrays = case.plan(problem.segments).arrays
    index = {name: torch.from_numpy(arrays[name]) for name in NAMES[1:5]}
    given = {**index, "output": torch.empty_like(problem.query), **changes}
    with pytest.raises(ValueError, match=message):
        attn_prefill(problem.query, keys, values, **given, tile_tokens=8, scale=1.0)


def test_an_h200_gets_four_waves_of_work_items() -> None:
    assert max_items(shape(num_heads=32, kv_heads=8), multiprocessors=132) == 4 * 132 * 3 // 8
    assert prefill_tile(shape(num_heads=14, kv_heads=2)).tokens(shape(num_heads=14)) == 18
