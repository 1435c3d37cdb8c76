"""Tile sizes of the attention kernels by (architecture, head_dim, group, type of the pool).

NOT TUNED: nothing here was timed on a GPU. The defaults follow from ahead-of-time compilation
alone: no spilled registers, at least two tiles on their way, shared memory within the limit of
sm_80, sm_90 and sm_100. What is measured later becomes an entry of `TUNED_DECODE` or
`TUNED_PREFILL`, which come first. Nothing is chosen at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton

from kernels.gpu.attention_shape import FP8, AttentionShape

WAVES = 4
"""Work items of a decode step for each program that the device holds at once: enough that a late
one costs little, few enough that partial results do."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program takes at a time."""

    keys: int
    """Keys and values of an iteration. At most a block, one table lookup serves them all."""
    num_warps: int
    num_stages: int
    rows: int = 16
    """Query rows: tokens times the heads that share their keys."""
    resident: int = 2
    """Programs that a multiprocessor holds at once."""

    def tokens(self, shape: AttentionShape) -> int:
        """Tokens of a query tile."""
        return max(1, self.rows // shape.group)


Key = tuple[int, int, int, torch.dtype]
"""(arch, head_dim, heads that share a KV head, type of the pool)."""

TUNED_DECODE: Mapping[Key, Tile] = {}
TUNED_PREFILL: Mapping[Key, Tile] = {}


def decode_tile(shape: AttentionShape) -> Tile:
    """For `attn_decode`."""
    return TUNED_DECODE.get(_key(shape)) or _decode_default(shape)


def prefill_tile(shape: AttentionShape) -> Tile:
    """For `attn_prefill`."""
    return TUNED_PREFILL.get(_key(shape)) or _prefill_default(shape)


def max_items(shape: AttentionShape, multiprocessors: int) -> int:
    """`SplitPolicy.max_items` for a device of so many multiprocessors."""
    programs = WAVES * multiprocessors * decode_tile(shape).resident
    return max(1, programs // shape.head_programs)


def _key(shape: AttentionShape) -> Key:
    return shape.arch, shape.head_dim, shape.num_heads // shape.kv_heads, shape.pool_dtype


def _width(shape: AttentionShape) -> int:
    """Of a tile of keys, which is a power of two."""
    return triton.next_power_of_2(max(shape.head_dim, shape.value_dim))


def _decode_default(shape: AttentionShape) -> Tile:
    width = _width(shape)
    wide = width > 128
    # More query rows than an instruction multiplies take more registers: spread over more warps.
    num_warps = 8 if shape.group > 16 and width > 64 else 4
    if shape.pool_dtype == torch.float32:
        return Tile(keys=16 if wide else 32, num_warps=num_warps, num_stages=2)
    if shape.pool_dtype == FP8:
        return Tile(keys=32, num_warps=num_warps, num_stages=4, resident=3)
    return Tile(keys=32 if wide else 64, num_warps=num_warps, num_stages=3, resident=3)


def _prefill_default(shape: AttentionShape) -> Tile:
    width = _width(shape)
    if shape.pool_dtype == torch.float32:  # only checks use it
        return Tile(rows=16, keys=16 if width > 128 else 32, num_warps=8, num_stages=2)
    if width > 128:
        return Tile(rows=64, keys=32, num_warps=8, num_stages=3)
    if width > 64 and shape.arch < 90:  # more keys spill with a window or a cap
        return Tile(rows=128, keys=32, num_warps=8, num_stages=3)
    if width <= 64 and shape.arch >= 100:
        return Tile(rows=64, keys=64, num_warps=8, num_stages=3)
    # Before wgmma, operands lie in registers: addresses that differ from token to token as well
    # leave too few of them.
    keys = 32 if shape.arch < 90 and shape.block_size < 64 else 64
    return Tile(rows=128, keys=keys, num_warps=8, num_stages=3)
