"""KV as 8-bit floats: the format itself, and every path of attention over it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels import cpu_bags, fp8
from kernels.attention_batch import AttentionBatch, Segment
from kernels.dispatch import paged_attention
from kernels.fp8 import FP8, FP8_MAX, converted, quantise
from kernels.reference import paged_attention_reference
from tests.kernels.attention_case import AttentionCase, Problem, relative_error

MIXED = [(0, 1), (40, 1), (0, 5), (16, 1), (16, 16), (31, 2), (17, 15), (0, 33), (7, 1)]
VARIANTS = {
    "plain": {},
    "few heads": {"heads": 2, "kv_heads": 2},
    "window": {"window": 17},
    "all": {"window": 17, "soft_cap": 3.0, "has_sinks": True},
    "wide values": {"dim": 16, "value_dim": 24},
    "large blocks": {"block_size": 64},
    "shared": {"spans": [(40, 1), (32, 1), (70, 1), (33, 1), (35, 3)], "shared_blocks": 2},
    "lengths": {"spans": [(299, 1), *[(n, 1) for n in range(0, 40, 3)]], "heads": 2},
}


def value_of(code: int) -> float:
    """What an e4m3 byte stands for (OCP 8-bit Floating Point Specification, table 1)."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


VALUES = [value_of(code) for code in range(256)]


@pytest.mark.parametrize("part", [1, 48, 2**18])
@pytest.mark.parametrize("nan", [True, False])
def test_every_code_is_widened_to_its_value(
    monkeypatch: pytest.MonkeyPatch, nan: bool, part: int
) -> None:
    monkeypatch.setattr(fp8, "_PART", part)
    codes = torch.tensor([code for code in range(256) if nan or not math.isnan(VALUES[code])])
    stored = codes.to(torch.uint8).view(FP8).view(-1, 2)
    found = converted(stored, torch.float32).flatten()
    expected = torch.tensor([VALUES[code] for code in codes.tolist()])
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.signbit()[~found.isnan()], expected.signbit()[~expected.isnan()])


def test_values_are_rounded_to_the_nearest_and_never_beyond_the_greatest() -> None:
    finite = sorted({value for value in VALUES if not math.isnan(value)})
    between = [(low + high) / 2 for low, high in pairwise(finite)]
    offered = [*finite, *(x * (1 - 1e-4) for x in between), *(x * (1 + 1e-4) for x in between)]
    expected = [min(finite, key=lambda value: abs(value - x)) for x in offered]
    offered += [449.0, -500.0, 1e30, math.inf, -math.inf]
    expected += [FP8_MAX, -FP8_MAX, FP8_MAX, FP8_MAX, -FP8_MAX]
    scale = torch.tensor([0.25])
    found = quantise(torch.tensor(offered).view(-1, 1, 1) * 0.25, scale)
    assert converted(found, torch.float32).flatten().tolist() == expected
    assert converted(quantise(torch.full((1, 1, 1), math.nan), scale), torch.float32).isnan().all()


@dataclass(frozen=True)
class Scaled:
    """A problem over an e4m3 pool, whose stored context is what a context of unit variance
    leaves there, and the scales to read it with."""

    problem: Problem
    k_scale: Tensor
    v_scale: Tensor

    @classmethod
    def build(cls, case: AttentionCase) -> Scaled:
        problem = replace(case, pool_dtype=FP8, poison=FP8_MAX).build()
        generator = torch.Generator().manual_seed(1)
        scales = 0.003 + 2.0 * torch.rand(2, case.kv_heads, generator=generator)
        # New keys and values are of the size of the context's, in each head.
        key, value = problem.key * scales[0, :, None], problem.value * scales[1, :, None]
        return cls(replace(problem, key=key, value=value), *scales)

    @torch.inference_mode()
    def run(self, segments: list[Segment], rows: slice = slice(None)) -> Tensor:
        given, case = self.problem, self.problem.case
        return paged_attention(
            given.query[rows],
            given.key[rows],
            given.value[rows],
            given.key_blocks,
            given.value_blocks,
            AttentionBatch.build(segments, case.block_size, "cpu"),
            scale=case.dim**-0.5,
            window=case.window,
            soft_cap=case.soft_cap,
            sinks=given.sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
        )

    def expected(self) -> Tensor:
        given, case = self.problem, self.problem.case
        return paged_attention_reference(
            given.query,
            _as_stored(given.key, self.k_scale),
            _as_stored(given.value, self.v_scale),
            given.key_blocks.double() * self.k_scale.double().view(-1, 1, 1),
            given.value_blocks.double() * self.v_scale.double().view(-1, 1, 1),
            given.segments,
            scale=case.dim**-0.5,
            window=case.window,
            soft_cap=case.soft_cap,
            sinks=given.sinks,
        )


def _as_stored(new: Tensor, scale: Tensor) -> Tensor:
    """float64 of what a slot holds."""
    return (new.float() / scale[:, None]).to(FP8).double() * scale.double()[:, None]


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_attention_over_stored_values_is_exact(
    options: dict[str, object], transposed: bool
) -> None:
    case = replace(AttentionCase(MIXED, transposed=transposed), **options)  # type: ignore[arg-type]
    scaled = Scaled.build(case)
    expected = scaled.expected()
    assert relative_error(scaled.run(list(scaled.problem.segments)), expected) < 1e-5


@pytest.mark.parametrize("length", [80, 1100])
def test_a_prefill_that_nothing_precedes_reads_what_it_stores(length: int) -> None:
    """The longer one by flash attention."""
    scaled = Scaled.build(AttentionCase([(0, length)], heads=2, kv_heads=1, block_size=64))
    expected = scaled.expected()
    assert relative_error(scaled.run(list(scaled.problem.segments)), expected) < 1e-5


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_chunks_make_no_difference(chunk: int) -> None:
    scaled = Scaled.build(AttentionCase([(0, 47)]))
    whole = scaled.run(list(scaled.problem.segments))
    stored = [blocks.float() for blocks in (scaled.problem.key_blocks, scaled.problem.value_blocks)]
    blocks = scaled.problem.segments[0].blocks
    parts = []
    for start in range(0, 47, chunk):
        rows = slice(start, min(start + chunk, 47))
        parts.append(scaled.run([Segment(start, rows.stop - start, blocks)], rows))
    assert relative_error(torch.cat(parts), whole) < 1e-6
    again = [blocks.float() for blocks in (scaled.problem.key_blocks, scaled.problem.value_blocks)]
    assert all(torch.equal(*pair) for pair in zip(stored, again, strict=True))


def test_bfloat16_queries_over_fp8_are_computed_in_float32() -> None:
    scaled = Scaled.build(replace(AttentionCase(MIXED), dtype=torch.bfloat16))
    expected = scaled.expected()
    found = scaled.run(list(scaled.problem.segments))
    assert found.dtype == torch.bfloat16
    assert relative_error(found, expected) < 3e-3, "one rounding of the output"


def test_scattered_blocks_are_gathered_before_they_are_widened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways, by range and by gather, are exact."""
    for sparseness in (0.0, 1e9):
        monkeypatch.setattr(cpu_bags, "MAX_SPARSENESS", sparseness)
        scaled = Scaled.build(AttentionCase([(40, 1), (33, 1), (7, 1)]))
        expected = scaled.expected()
        assert relative_error(scaled.run(list(scaled.problem.segments)), expected) < 1e-5


@pytest.mark.parametrize(("has_k", "has_v"), [(False, False), (True, False), (False, True)])
def test_an_fp8_pool_is_never_read_without_scales(has_k: bool, has_v: bool) -> None:
    scaled = Scaled.build(AttentionCase([(3, 1)]))
    scaled = replace(
        scaled,
        k_scale=scaled.k_scale if has_k else None,
        v_scale=scaled.v_scale if has_v else None,
    )
    with pytest.raises(ValueError, match="k_scale and v_scale go with an e4m3 pool"):
        scaled.run(list(scaled.problem.segments))


def test_no_other_pool_takes_scales() -> None:
    problem = AttentionCase([(3, 1)]).build()
    with pytest.raises(ValueError, match="k_scale and v_scale go with an e4m3 pool"):
        Scaled(problem, torch.ones(2), torch.ones(2)).run(list(problem.segments))
