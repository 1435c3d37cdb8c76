"""What every compiled variant must keep to."""

from __future__ import annotations

from dataclasses import dataclass

from tests.kernels.aot.compiling import Compiled, Target
from tests.kernels.aot.machine_code import MachineCode

KIB = 1024
SHARED_LIMIT = {80: 163 * KIB, 90: 227 * KIB, 100: 227 * KIB}
"""Bytes that one program may have (CUDA C++ Programming Guide, "Compute Capabilities")."""


FP8 = "fp8e4nv"
STREAMING = frozenset(
    {"kv_write", "rms_norm", "silu_mul", "block_copy", "block_gather", "block_scatter"}
)
"""Ops that do little but move memory."""
NARROWEST = "BLOCK=128,"
"""How the identity of a norm over rows of 128 begins."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Stack that is put up with."""

    op: str
    arch: int
    aligned: bool
    stack: int
    """Bytes a thread, at the most."""
    reason: str
    having: str = ""
    """Part of the identities that it is for."""


UNALIGNED = (
    "nobody passes such pointers: torch aligns to 512 bytes, views start at whole heads or blocks. "
    "Without wide loads a tile needs one address for each pair of bytes"
)
ALLOWANCES: tuple[Allowance, ...] = (
    *(
        Allowance(op, arch, aligned=False, stack=4096, reason=UNALIGNED)
        for op in ("attn_decode", "attn_prefill")
        for arch in SHARED_LIMIT
    ),
    Allowance(
        "rms_norm",
        80,
        aligned=True,
        stack=8,
        reason="float32 weights beside rows of 8,192 to 16,384 with a residual: no model has them",
        having="BLOCK=16384,RESIDUAL_STRIDE=16,ROUNDED=False,WIDTH=16,",
    ),
)


def faults(key: str, target: Target, compiled: Compiled) -> list[str]:
    """What is wrong, in words, with the variant of that identity; empty where nothing is."""
    op = key.partition("[")[0]
    if compiled.code is None:
        return [f"does not compile: {compiled.error}"]
    found = [f"unwidened index: {overflow}" for overflow in compiled.overflows]
    limit = SHARED_LIMIT[target.arch]
    if compiled.shared > limit:
        found.append(f"{compiled.shared:,} bytes of shared memory, the device has {limit:,}")
    found += _spills(key, target, compiled.code)
    if op == "attn_prefill" and target.arch == 90 and not compiled.code.wgmma:
        found.append("no wgmma")
    if op == "attn_prefill" and target.arch == 100 and not compiled.code.tcgen05:
        found.append("no tcgen05")
    if target.aligned:
        found += _narrow(key, compiled.code)
    return found


def _narrow(key: str, code: MachineCode) -> list[str]:
    """Where pointers are multiples of 16 bytes, data moves in pieces of 16 bytes; but values of a
    byte each come in pieces of 8, in the layout that Triton gives them before they are converted.
    """
    op = key.partition("[")[0]
    if op == "attn_decode" and not code.wide_copies:
        return ["no asynchronous copies of 16 bytes in the loop"]
    if op == "attn_decode" and code.narrow_copies and FP8 not in key:
        return [f"{code.narrow_copies} asynchronous copies of fewer than 16 bytes in the loop"]
    # A warp takes a row of 128 norm inputs in pieces of 8.
    if op in STREAMING and not code.wide_loads and f"rms_norm[{NARROWEST}" not in key:
        return ["no loads of 16 bytes"]
    return []


def _spills(key: str, target: Target, code: MachineCode) -> list[str]:
    op = key.partition("[")[0]
    allowed = max(
        (
            known.stack
            for known in ALLOWANCES
            if (known.op, known.arch, known.aligned) == (op, target.arch, target.aligned)
            and known.having in key
        ),
        default=0,
    )
    if code.stack > allowed:
        return [f"{code.stack} bytes of stack, {allowed} allowed"]
    if code.local and not allowed:
        return [f"{code.local} instructions on local memory"]
    return []
