"""A subset of all kernel variants, compiled cold for GPUs that are not here, keeps to the rules."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version

import pytest

from tests.kernels.aot import rules, subset, table
from tests.kernels.aot.compiling import Compiled, Target
from tests.kernels.aot.survey import Finding

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MOST = 150
"""Compilations that the suite may do."""
UNWIDENED = (
    "block_times_stride",
    "widened_too_late",
    "carried_block",
    "growing_offset",
    "program_row",
)
"""Of `bad_kernels.py`."""


def test_no_variant_has_a_fault(findings: list[Finding]) -> None:
    faults = [
        f"{finding.target}: {finding.key}: {fault}"
        for finding in findings
        for fault in rules.faults(finding.key, finding.target, finding.compiled)
    ]
    assert not faults, "\n".join(faults)


def test_no_variant_takes_more_than_the_table_says(findings: list[Finding]) -> None:
    rows = table.read(version("triton"))
    if rows is None:
        pytest.skip(f"resources.json has nothing of triton {version('triton')}")
    grown = [
        f"{finding.target}: {finding.key}: {fault}"
        for finding in findings
        if finding.compiled.code is not None
        for fault in table.regressions(rows, finding.key, finding.target, finding.compiled)
    ]
    assert not grown, "\n".join(grown)


def test_the_subset_is_small_and_covers_ops_targets_and_alignments(
    findings: list[Finding],
) -> None:
    assert len(findings) <= MOST
    counted = Counter((finding.op, finding.target.arch) for finding in findings)
    ops = {choice.op for choice in subset.CHOICES}
    assert {op for op, _ in counted} == ops
    assert all(counted[op, arch] for op in ops for arch in rules.SHARED_LIMIT)
    assert {finding.target for finding in findings} == {
        Target(arch, aligned) for arch in rules.SHARED_LIMIT for aligned in (True, False)
    }


def test_wgmma_and_wide_copies_are_where_speed_needs_them(findings: list[Finding]) -> None:
    for finding in findings:
        code = finding.compiled.code
        assert code is not None
        if (finding.op, finding.target) == ("attn_prefill", Target(90)):
            assert code.wgmma, finding.key
        if finding.op in ("attn_decode", "attn_prefill") and finding.target.aligned:
            assert code.wide_copies, finding.key


@pytest.mark.parametrize("name", UNWIDENED)
def test_index_arithmetic_that_is_not_widened_is_found(
    bad_kernels: dict[str, Compiled], name: str
) -> None:
    bad, good = bad_kernels[f"{name} bad"], bad_kernels[f"{name} good"]
    assert bad.overflows
    assert not good.overflows


def test_spilled_registers_are_found(bad_kernels: dict[str, Compiled]) -> None:
    bad, good = bad_kernels["many_values bad"], bad_kernels["many_values good"]
    assert any("stack" in fault for fault in rules.faults("bad", Target(90), bad))
    assert not rules.faults("bad", Target(90), good)


def test_too_much_shared_memory_is_found(bad_kernels: dict[str, Compiled]) -> None:
    bad, good = bad_kernels["deep_pipeline bad"], bad_kernels["deep_pipeline good"]
    assert any("shared memory" in fault for fault in rules.faults("bad", Target(90), bad))
    assert not rules.faults("bad", Target(90), good)


def test_fp8_does_not_compile_where_it_is_not_listed(bad_kernels: dict[str, Compiled]) -> None:
    assert "fp8e4nv" in bad_kernels["fp8 on sm_80"].error
