"""What counts as a fault, without compiling."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kernels.aot.compiling import Compiled, Target
from tests.kernels.aot.machine_code import MachineCode
from tests.kernels.aot.rules import ALLOWANCES, SHARED_LIMIT, faults

CODE = MachineCode(
    registers=128,
    stack=0,
    local=0,
    instructions=1000,
    wgmma=24,
    tcgen05=24,
    wide_copies=16,
    narrow_copies=0,
    wide_loads=4,
)
GOOD = Compiled(CODE, shared=64 * 1024)
HOPPER = Target(90)


def having(**changes: int) -> Compiled:
    return replace(GOOD, code=replace(CODE, **changes))


@pytest.mark.parametrize("op", ["attn_decode", "attn_prefill", "block_gather", "sample_race"])
def test_a_good_kernel_has_no_fault(op: str) -> None:
    assert not faults(op, HOPPER, GOOD)


@pytest.mark.parametrize(
    ("op", "compiled", "word"),
    [
        ("sample_race", having(stack=8), "stack"),
        ("sample_race", having(local=1), "local memory"),
        ("attn_prefill", having(wgmma=0), "wgmma"),
        ("attn_decode", having(wide_copies=0), "asynchronous copies"),
        ("attn_decode[key_blocks=*bf16]", having(narrow_copies=8), "fewer than 16 bytes"),
        ("block_gather", having(wide_loads=0), "loads of 16 bytes"),
        ("silu_mul", replace(GOOD, overflows=("%1 = arith.muli",)), "unwidened index"),
        ("silu_mul", Compiled(error="ValueError: no"), "does not compile: ValueError: no"),
    ],
)
def test_each_fault_is_named(op: str, compiled: Compiled, word: str) -> None:
    (found,) = faults(op, HOPPER, compiled)
    assert word in found


@pytest.mark.parametrize(("arch", "kib"), [(80, 163), (90, 227), (100, 227)])
def test_shared_memory_is_held_to_the_device(arch: int, kib: int) -> None:
    assert SHARED_LIMIT[arch] == kib * 1024
    full = replace(GOOD, shared=kib * 1024)
    assert not faults("sample_race", Target(arch), full)
    assert faults("sample_race", Target(arch), replace(full, shared=full.shared + 1))


def test_each_architecture_has_its_own_matrix_products() -> None:
    assert faults("attn_prefill", Target(90), having(wgmma=0)) == ["no wgmma"]
    assert faults("attn_prefill", Target(100), having(tcgen05=0)) == ["no tcgen05"]
    assert not faults("attn_prefill", Target(80), having(wgmma=0, tcgen05=0))
    assert not faults("attn_prefill", Target(100), having(wgmma=0))


def test_values_of_a_byte_may_come_in_smaller_pieces() -> None:
    assert not faults("attn_decode[key_blocks=*fp8e4nv]", HOPPER, having(narrow_copies=8))


def test_only_aligned_pointers_are_read_wide() -> None:
    assert not faults("attn_decode", Target(90, aligned=False), having(wide_copies=0))


@pytest.mark.parametrize("known", ALLOWANCES, ids=lambda known: f"{known.op} {known.arch}")
def test_an_allowance_is_for_one_op_and_target_and_has_a_limit_and_a_reason(
    known: object,
) -> None:
    target = Target(known.arch, known.aligned)
    spilling = having(stack=known.stack, local=4)
    assert known.reason
    key = f"{known.op}[{known.having}]"
    assert not faults(key, target, spilling)
    assert faults(key, target, having(stack=known.stack + 1))
    assert faults(key, Target(known.arch, not known.aligned), spilling)
    if known.having:
        assert faults(f"{known.op}[BLOCK=64]", target, spilling)
