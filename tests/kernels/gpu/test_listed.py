"""Dispatch launches nothing that `kernels/variants.py` does not list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kernels import dispatch, variants
from kernels.attention_batch import Segment
from kernels.fp8 import FP8
from kernels.gpu import block_moves, tiles
from kernels.gpu.attention_shape import AttentionShape
from kernels.gpu.attention_step import AttentionStep, plan_step
from kernels.gpu.launch import Launch
from kernels.gpu.split_plan import SplitPolicy
from kernels.head_transform import HeadTransform
from kernels.variants import VariantError

BF16, DIM, SIZE = torch.bfloat16, 128, 64
SAMPLING = ("allow_only", "edit_scores", "sample_peaks", "sample_race", "sample_pick")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(variants, "checks", lambda device: True)
    yield
    for cached in (block_moves._require, variants.require_layer):
        cached.cache_clear()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What is launched; nothing runs."""
    found: list[Launch] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, grid, **arguments: found.append(self))
    return found


def unlist(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Take an op out of the list."""
    whole = variants._by_identity(90)
    rest = {key: launch for key, launch in whole.items() if launch.op != op}
    monkeypatch.setattr(variants, "_by_identity", lambda arch: rest)
    block_moves._require.cache_clear()


def attend(
    *,
    fused: bool = True,
    rotated: bool = True,
    pool_dtype: torch.dtype = BF16,
    tile_tokens: int | None = None,
) -> None:
    """A mixed step of a layer of Llama 3.1 8B, its heads out of one projection or of three."""
    heads, kv_heads, tokens = 32, 8, 7
    packed = torch.zeros(tokens, heads + 2 * kv_heads, DIM, dtype=BF16)
    query, key, value = packed.split((heads, kv_heads, kv_heads), 1)
    cos = torch.zeros(tokens, DIM, dtype=BF16)
    if not fused:
        query, key, value = (part.contiguous() for part in (query, key, value))
    pool = torch.zeros(3, 5, 2, kv_heads, SIZE, DIM, dtype=pool_dtype)
    keys, values = pool[:, 1, 0], pool[:, 1, 1]
    shape = AttentionShape.of(query, keys, values)
    step = plan_step(
        [Segment(3, 1, (1,)), Segment(5, 1, (1,)), Segment(0, 5, (2,))],
        SIZE,
        (None,),
        max_blocks=1,
        tile_tokens=tile_tokens or tiles.prefill_tile(shape).tokens(shape),
        policy=SplitPolicy(4),
    )
    scales = torch.ones(kv_heads) if pool_dtype == FP8 else None
    dispatch.paged_attention(
        query,
        key,
        value,
        keys,
        values,
        AttentionStep.on(step, "cpu"),
        scale=0.1,
        k_scale=scales,
        v_scale=scales,
        heads=HeadTransform(cos, cos) if rotated else None,
    )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("pool_dtype", [BF16, FP8])
def test_what_attention_launches_is_what_was_checked(
    monkeypatch: pytest.MonkeyPatch,
    launched: list[Launch],
    fused: bool,
    rotated: bool,
    pool_dtype: torch.dtype,
) -> None:
    """To the constant, strides included: no launch compiles what the check has not seen."""
    checked: list[Launch] = []
    monkeypatch.setattr(variants, "require", lambda launch, arch: checked.append(launch))
    attend(fused=fused, rotated=rotated, pool_dtype=pool_dtype)
    assert [launch.op for launch in launched] == [
        "kv_write",
        "attn_decode",
        "attn_merge",
        "attn_prefill",
    ]
    assert {launch.key for launch in launched} == {launch.key for launch in checked}


@pytest.mark.parametrize("op", ["kv_write", "attn_decode", "attn_merge", "attn_prefill"])
def test_attention_is_refused_by_the_name_of_what_is_not_listed(
    monkeypatch: pytest.MonkeyPatch, launched: list[Launch], op: str
) -> None:
    attend()
    assert len(launched) == 4
    unlist(monkeypatch, op)
    variants.require_layer.cache_clear()
    with pytest.raises(VariantError, match=f"{op} is no kernel that is listed"):
        attend()
    assert len(launched) == 4, "nothing of the layer was launched"


def test_a_query_tile_of_another_size_is_refused(launched: list[Launch]) -> None:
    with pytest.raises(VariantError, match=r"attn_prefill is not listed with .*ROWS=16"):
        attend(tile_tokens=3)
    assert not launched


MOVES: dict[str, Callable[[Any], None]] = {
    "block_copy": lambda by: by.copy(torch.zeros(4, 8, 4, dtype=BF16), torch.tensor([(1, 2)])),
    "block_gather": lambda by: by.gather(
        torch.zeros(4, 8, 4, dtype=BF16), torch.tensor([1]), torch.zeros(1, 8, 4, dtype=BF16)
    ),
    "block_scatter": lambda by: by.scatter(
        torch.zeros(1, 8, 4, dtype=BF16), torch.tensor([1]), torch.zeros(4, 8, 4, dtype=BF16)
    ),
}


@pytest.mark.parametrize("op", MOVES)
def test_blocks_of_unlisted_sizes_are_not_moved(launched: list[Launch], op: str) -> None:
    """Of 64 bytes here: no model's, and no multiple of what a listed one is."""
    with pytest.raises(VariantError, match="block_gather is not listed with BLOCK_STRIDE=8"):
        MOVES[op](dispatch.block_moves("triton"))
    assert not launched


def test_blocks_of_models_are_moved(launched: list[Launch]) -> None:
    moves = dispatch.block_moves("triton")
    pool = torch.zeros(40, 2, 2, 1, 16, 16, dtype=BF16)
    pairs = torch.arange(40).view(20, 2)
    for count in (1, 2, 3, 20):
        moves.copy(pool, pairs[:count])
    moves.gather(pool, pairs[0], pool[:2].clone())
    moves.scatter(pool[:2].clone(), pairs[0], pool)
    assert [launch.op for launch in launched] == [
        *["block_copy"] * 4,
        "block_gather",
        "block_scatter",
    ]
    known = {variants.identity(launch) for launch in variants.variants(90)}
    assert {variants.identity(launch) for launch in launched} <= known


def test_a_pool_is_checked_once(monkeypatch: pytest.MonkeyPatch, launched: list[Launch]) -> None:
    asked: list[Launch] = []
    monkeypatch.setattr(variants, "require", lambda launch, arch: asked.append(launch))
    for _ in range(3):
        for move in MOVES.values():
            move(dispatch.block_moves("triton"))
    assert len(launched) == 9
    assert len(asked) == len({launch.key for launch in asked}) == 8


@pytest.mark.parametrize("op", SAMPLING)
def test_a_sampler_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    dispatch.sampling(151_936, "cpu")
    unlist(monkeypatch, op)
    with pytest.raises(VariantError, match=f"{op} is no kernel that is listed"):
        dispatch.sampling(151_936, "cpu")


def test_a_sampler_takes_no_other_vocabulary(launched: list[Launch]) -> None:
    """What it was checked for is what it launches."""
    sampling = dispatch.sampling(64, "cpu")
    nothing, rows = torch.zeros(0), torch.zeros(0, dtype=torch.int32)
    scores = torch.zeros(2, 63)
    for call in (
        lambda: sampling.allow_only(scores, rows, rows),
        lambda: sampling.edit(scores, rows, rows, nothing, nothing, nothing),
        lambda: sampling.sample(scores, nothing, rows, nothing, nothing, rows),
    ):
        with pytest.raises(ValueError, match=r"\(2, 63\) is not \[R, 64\]"):
            call()
    assert not launched
    with pytest.raises(ValueError, match="a vocabulary of 300000 tokens"):
        dispatch.sampling(300_000, "cpu")


def test_norms_and_gates_of_unlisted_types_are_refused(launched: list[Launch]) -> None:
    ops = dispatch.elementwise("triton")
    x, weight = torch.zeros(3, 2048, dtype=BF16), torch.zeros(2048, dtype=BF16)
    ops.rms_norm(x, weight, 1e-6, rounded=True)
    ops.add_rms_norm(x, x, weight, 1e-6, rounded=True)
    ops.silu_mul(x)
    assert [launch.op for launch in launched] == ["rms_norm", "rms_norm", "silu_mul"]
    with pytest.raises(VariantError, match=r"rms_norm is not listed with .*x=\*fp32"):
        ops.rms_norm(x.float(), weight, 1e-6, rounded=True)
    with pytest.raises(VariantError, match=r"rms_norm is not listed with .*X_STRIDE=2052"):
        ops.rms_norm(torch.zeros(3, 2052, dtype=BF16)[:, :2048], weight, 1e-6, rounded=True)
    with pytest.raises(VariantError, match=r"silu_mul is not listed with .*fp32"):
        ops.silu_mul(x.float())
    assert len(launched) == 3


def test_a_lone_token_is_as_far_from_the_next_as_others_are() -> None:
    """Torch gives a dimension of one any stride; kernels would be compiled for each."""
    odd = torch.zeros(8, 1, 16).transpose(0, 1).as_strided((1, 8, 16), (16, 16, 1))
    assert dispatch._packed(odd).stride() == (128, 16, 1)
    assert dispatch._packed(odd).data_ptr() == odd.data_ptr()
    fused = torch.zeros(1, 12, 16)[:, 2:10]
    assert dispatch._packed(fused).stride() == fused.stride() == (192, 16, 1)
