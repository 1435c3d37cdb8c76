"""Kernels with faults, and twins without: what the checks must find. Run as a module, in a clean
environment, it prints what came of each as JSON."""

# ruff: noqa: N803, N806

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import triton
import triton.language as tl

from kernels.gpu.launch import Launch
from tests.kernels.aot.compiling import Target, compile_launch
from tests.kernels.aot.intervals import Interval
from tests.kernels.aot.offsets import Bounds

BOUNDS = Bounds(
    scalars={"n": Interval(0, 1 << 20)},
    loads={"table": Interval(0, 1 << 20)},
    grid=(1 << 18, 1, 1),
)
STRIDE = 1 << 14
"""Elements a block: a million of them are 2^34."""


@triton.jit(do_not_specialize=["n"])
def _block_times_stride(pool, table, out, n, STRIDE: tl.constexpr, WIDE: tl.constexpr):
    block = tl.load(table)
    if WIDE:
        block = block.to(tl.int64)
    places = tl.arange(0, 64)
    tl.store(out + places, tl.load(pool + block * STRIDE + places))


@triton.jit(do_not_specialize=["n"])
def _widened_too_late(pool, table, out, n, STRIDE: tl.constexpr, WIDE: tl.constexpr):
    offset = tl.load(table) * STRIDE if not WIDE else tl.load(table).to(tl.int64) * STRIDE
    places = tl.arange(0, 64)
    tl.store(out + places, tl.load(pool + offset.to(tl.int64) + places))


@triton.jit(do_not_specialize=["n"])
def _carried_block(pool, table, out, n, STRIDE: tl.constexpr, WIDE: tl.constexpr):
    places = tl.arange(0, 64)
    total = tl.zeros([64], tl.float32)
    block = tl.load(table)
    if WIDE:
        block = block.to(tl.int64)
    for at in range(n):
        total += tl.load(pool + block * STRIDE + places)
        block = tl.load(table + at + 1)
        if WIDE:
            block = block.to(tl.int64)
    tl.store(out + places, total)


@triton.jit(do_not_specialize=["n"])
def _growing_offset(pool, table, out, n, STRIDE: tl.constexpr, WIDE: tl.constexpr):
    places = tl.arange(0, 64)
    total = tl.zeros([64], tl.float32)
    offset = tl.full([], 0, tl.int64) if WIDE else tl.full([], 0, tl.int32)
    for _ in range(n):
        total += tl.load(pool + offset + places)
        offset += STRIDE
    tl.store(out + places, total)


@triton.jit(do_not_specialize=["n"])
def _program_row(pool, table, out, n, STRIDE: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    places = row * STRIDE + tl.arange(0, 64)
    tl.store(out + places, tl.load(pool + places))


@triton.jit(do_not_specialize=["n"])
def _many_values(pool, table, out, n, STRIDE: tl.constexpr, WIDE: tl.constexpr):
    SIZE: tl.constexpr = 32 if WIDE else 128
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for at in range(n):
        total = total * total + tl.load(pool + at.to(tl.int64) * STRIDE + places)
    tl.store(out + places, total)


@triton.jit(do_not_specialize=["n"])
def _deep_pipeline(pool, table, out, n, STRIDE: tl.constexpr, WIDE: tl.constexpr):
    SIZE: tl.constexpr = 64 if WIDE else 256
    rows, columns = tl.arange(0, 64)[:, None], tl.arange(0, SIZE)[None, :]
    inner, lines = tl.arange(0, SIZE)[:, None], tl.arange(0, 64)[None, :]
    total = tl.zeros([64, 64], tl.float32)
    for at in range(n):
        left = tl.load(pool + at.to(tl.int64) * STRIDE + rows * SIZE + columns)
        right = tl.load(pool + at.to(tl.int64) * STRIDE + inner * 64 + lines)
        total = tl.dot(left, right, total, input_precision="tf32")
    tl.store(out + rows * 64 + lines, total)


@dataclass(frozen=True, slots=True)
class Pair:
    """A kernel that is at fault unless WIDE."""

    kernel: object
    num_warps: int = 1
    num_stages: int = 1

    def launch(self, *, wide: bool) -> Launch:
        types = {"pool": "*fp32", "table": "*i32", "out": "*fp32", "n": "i32"}
        constants = {"STRIDE": STRIDE, "WIDE": wide}
        return Launch("bad", self.kernel, types, constants, self.num_warps, self.num_stages)


PAIRS = {
    "block_times_stride": Pair(_block_times_stride),
    "widened_too_late": Pair(_widened_too_late),
    "carried_block": Pair(_carried_block),
    "growing_offset": Pair(_growing_offset),
    "program_row": Pair(_program_row),
    "many_values": Pair(_many_values),
    "deep_pipeline": Pair(_deep_pipeline, num_warps=4, num_stages=4),
}


def main() -> int:
    found = {}
    for name, pair in PAIRS.items():
        for wide in (False, True):
            compiled = compile_launch(pair.launch(wide=wide), Target(90), BOUNDS)
            found[f"{name} {'good' if wide else 'bad'}"] = compiled.as_json()
    found["fp8 on sm_80"] = _fp8_on_sm_80()
    print(json.dumps(found))
    return 0


def _fp8_on_sm_80() -> dict[str, object]:
    """A listed variant for a device that the list does not give it to."""
    from kernels.variants import variants

    launch = next(one for one in variants(90) if one.types.get("key_blocks") == "*fp8e4nv")
    return compile_launch(launch, Target(80)).as_json()


if __name__ == "__main__":
    sys.exit(main())
