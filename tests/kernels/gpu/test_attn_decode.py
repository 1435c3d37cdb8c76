"""Work items as the planner does not make them, scales, extreme scores, bad arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.gpu.attention_shape import AttentionShape
from kernels.gpu.attn_decode import MAX_PROGRAMS, attn_decode
from kernels.gpu.attn_merge import attn_merge
from kernels.gpu.split_plan import SplitPolicy, plan_splits
from kernels.gpu.tiles import Tile, decode_tile, prefill_tile
from tests.kernels.attention_case import AttentionCase, Problem, relative_error
from tests.kernels.gpu import step_case
from tests.kernels.gpu.step_case import NAN, StepCase, poisoned_outputs

LENGTHS = (90, 7, 32)


def decode_case() -> StepCase:
    spans = tuple((length - 1, 1) for length in LENGTHS)
    return StepCase(
        AttentionCase(
            spans, heads=4, kv_heads=2, dim=64, block_size=16, transposed=False, poison=NAN
        )
    )


def run(case: StepCase, problem: Problem, items: Tensor, row_parts: Tensor) -> Tensor:
    layer = case.layer(problem)
    table = torch.from_numpy(case.plan(problem.segments).arrays["block_table"])
    count = torch.tensor([int(row_parts[-1])], dtype=torch.int32)
    with poisoned_outputs():
        partials, lse = attn_decode(problem.query, *layer, table, items, count, scale=64**-0.5)
        output = torch.empty_like(problem.query)
    return attn_merge(partials, lse, row_parts, output)


def finely(chunk: int) -> tuple[Tensor, Tensor]:
    """Work items of `chunk` tokens, in the order of rows."""
    items, row_parts = [], [0]
    for row, length in enumerate(LENGTHS):
        items += [
            (row, first, min(first + chunk, length), row_parts[-1] + number)
            for number, first in enumerate(range(0, length, chunk))
        ]
        row_parts.append(len(items))
    return torch.tensor(items, dtype=torch.int32), torch.tensor(row_parts, dtype=torch.int32)


def test_more_splits_than_tiles() -> None:
    case = decode_case()
    problem = case.problem()
    items, row_parts = finely(5)
    assert row_parts.tolist() == [0, 18, 20, 27], "more than the merge reads at a time, and a few"
    found = run(case, problem, items, row_parts)
    assert relative_error(found, case.expected(problem, case.layer(problem))) < 1e-5


def test_programs_take_several_items_where_there_are_more_than_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = decode_case()
    problem = case.problem()
    items, row_parts = finely(16)
    expected = run(case, problem, items, row_parts)
    monkeypatch.setattr("kernels.gpu.attn_decode.MAX_PROGRAMS", 4)
    assert len(items) > 4 < MAX_PROGRAMS
    assert torch.equal(run(case, problem, items, row_parts), expected)


def test_items_past_the_count_are_not_read() -> None:
    case = decode_case()
    problem = case.problem()
    items, row_parts = finely(32)
    expected = run(case, problem, items, row_parts)
    junk = torch.full((3, 4), 2**30, dtype=torch.int32)
    assert torch.equal(run(case, problem, torch.cat((items, junk)), row_parts), expected)


def test_the_order_of_items_does_not_matter() -> None:
    case = decode_case()
    problem = case.problem()
    items, row_parts = finely(32)
    expected = run(case, problem, items, row_parts)
    assert torch.equal(run(case, problem, items.flip(0).contiguous(), row_parts), expected)


def test_scores_that_leave_float32_behind() -> None:
    """Of scores some thousands apart, the highest takes all; none overflows."""
    case = decode_case()
    problem = case.problem()
    problem.query.mul_(3000)
    ends = np.array(LENGTHS)
    plan = plan_splits(np.zeros_like(ends), ends, SplitPolicy(4))
    found = run(case, problem, torch.from_numpy(plan.items), torch.from_numpy(plan.row_parts))
    assert relative_error(found, case.expected(problem, case.layer(problem))) < 1e-5


@pytest.mark.parametrize("window", [None, 5])
def test_what_a_query_must_not_see_may_have_any_score(window: int | None) -> None:
    """Hidden scores far above the seen ones would leave these no weight."""
    case = StepCase(
        AttentionCase(((20, 20),), heads=2, kv_heads=1, dim=32, transposed=False, window=window)
    )
    problem = case.problem()
    problem.query.mul_(3000)
    layer = case.layer(problem)
    found = case.run(problem, layer)
    assert relative_error(found, case.expected(problem, layer)) < 1e-5


def test_layers_scale_keys_and_values() -> None:
    """What an fp8 pool means is stored times scale; here with stored values that are exact."""
    scales = torch.tensor([0.02, 0.5]), torch.tensor([4.0, 0.05])
    spans = ((40, 1), (17, 1), (3, 9))
    for cap in (None, 2.0):
        case = AttentionCase(
            spans, heads=4, kv_heads=2, dim=64, transposed=False, poison=NAN, soft_cap=cap
        )
        StepCase(case, scales=scales).check()


def test_an_fp8_pool_is_multiplied_in_float16() -> None:
    spans = ((40, 1), (17, 1), (3, 9))
    case = AttentionCase(
        spans,
        heads=4,
        kv_heads=2,
        dim=64,
        dtype=torch.float16,
        pool_dtype=torch.float8_e4m3fn,
        transposed=False,
        poison=NAN,
    )
    StepCase(case, scales=(torch.tensor([0.02, 2.0]), torch.tensor([0.25, 3.0]))).check()


def shape(**changes: object) -> AttentionShape:
    arguments: dict[str, object] = {
        "num_heads": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "block_size": 64,
        "layers": 4,
        "query_dtype": torch.bfloat16,
        "pool_dtype": torch.bfloat16,
        "arch": 90,
    }
    return AttentionShape.of_model(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "8 query heads do not share 3 KV heads"),
        ({"head_dim": 264}, "head_dim 264"),
        ({"value_dim": 20}, "value_dim 20"),
        ({"block_size": 48}, "block_size 48"),
        ({"query_dtype": torch.float64}, "query is torch.float64"),
        ({"pool_dtype": torch.float16}, "the pool is torch.float16"),
        ({"pool_dtype": torch.float8_e4m3fn, "arch": 80}, "8.9 or later, not 8.0"),
    ],
    ids=str,
)
def test_what_kernels_cannot_take_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape(**changes)


def test_an_fp8_pool_without_scales_is_refused() -> None:
    fp8 = shape(pool_dtype=torch.float8_e4m3fn)
    scale = torch.ones(2)
    fp8.check_scales(scale, scale)
    with pytest.raises(ValueError, match="k_scale is missing"):
        fp8.check_scales(None, None)
    with pytest.raises(ValueError, match="v_scale is missing"):
        fp8.check_scales(scale, None)
    with pytest.raises(ValueError, match="k_scale is \\[2\\] float32"):
        fp8.check_scales(torch.ones(3), scale)


def test_shapes_of_tensors_are_those_of_the_model() -> None:
    pool = torch.empty(3, 4, 2, 2, 64, 128, dtype=torch.bfloat16)
    query = torch.empty(5, 8, 128, dtype=torch.bfloat16)
    keys, values = pool[:, 1, 0], pool[:, 1, 1]
    assert AttentionShape.of(query, keys, values) == shape()
    assert AttentionShape.of(query, keys, values[..., :64]) == shape(value_dim=64)
    for wrong in (
        (query, keys, values.contiguous()),
        (query, keys, values[:, :1]),
        (torch.empty(5, 8, 136, dtype=torch.bfloat16), keys, values),
        (query.transpose(1, 2), keys, values),
    ):
        with pytest.raises(ValueError, match=r"differ|wide|contiguous|head_dim"):
            AttentionShape.of(*wrong)


def test_a_tuned_tile_comes_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = Tile(keys=128, num_warps=8, num_stages=2)
    key = (90, 128, 4, torch.bfloat16)
    monkeypatch.setattr("kernels.gpu.tiles.TUNED_DECODE", {key: tuned})
    monkeypatch.setattr("kernels.gpu.tiles.TUNED_PREFILL", {key: tuned})
    for tile in (decode_tile, prefill_tile):
        assert tile(shape()) == tuned
        for other in (shape(arch=80), shape(kv_heads=1), shape(head_dim=96)):
            assert tile(other) != tuned


def test_the_checks_here_see_poison() -> None:
    case = decode_case()
    keys, _ = case.layer(case.problem())
    assert keys[1:].isnan().any()
    assert keys.stride(0) == step_case.LAYERS * 2 * keys[0].numel()
