"""One attention problem: a pool whose unused slots are poisoned, and the oracle's answer to it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch, Segment
from kernels.dispatch import paged_attention
from kernels.pool_layout import transposed_keys
from kernels.reference import paged_attention_reference

POISON = 1000.0


def relative_error(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


@dataclass(frozen=True)
class AttentionCase:
    """`spans` are (start, length) of segments. With `shared_blocks`, each segment whose context
    holds that many full blocks has the same ones first."""

    spans: Sequence[tuple[int, int]]
    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    value_dim: int | None = None
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None
    transposed: bool = True
    scattered: bool = True
    shared_blocks: int = 0
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    poison: float = POISON
    seed: int = 0

    @property
    def used(self) -> list[int]:
        """Blocks of each span."""
        return [-(-(start + length) // self.block_size) for start, length in self.spans]

    @property
    def num_blocks(self) -> int:
        """The reserved block, and twice as many as are used."""
        return 1 + 2 * (sum(self.used) + self.shared_blocks)

    def segments(self) -> list[Segment]:
        spare = list(range(1, self.num_blocks))
        if self.scattered:
            random.Random(self.seed).shuffle(spare)
        shared = [spare.pop(0) for _ in range(self.shared_blocks)]
        segments = []
        for (start, length), count in zip(self.spans, self.used, strict=True):
            head = shared if start >= self.shared_blocks * self.block_size else []
            own = [spare.pop(0) for _ in range(count - len(head))]
            segments.append(Segment(start, length, [*head, *own]))
        return segments

    def build(self) -> Problem:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        segments = self.segments()
        pool_dtype = self.pool_dtype or self.dtype
        value_dim = self.value_dim or self.dim
        shape = (self.num_blocks, self.kv_heads, self.block_size, max(self.dim, value_dim))
        memory = torch.full(shape, self.poison, dtype=pool_dtype)
        keys = transposed_keys(memory.clone()) if self.transposed else memory.clone()
        values = memory
        for blocks, context in ((keys, draw(*shape)), (values, draw(*shape))):
            blocks[0] = 0
            for segment in segments:
                position = torch.arange(segment.start)
                block = torch.tensor(segment.blocks)[position // self.block_size]
                offset = position % self.block_size
                blocks[block, :, offset] = context[block, :, offset].to(pool_dtype)
        tokens = sum(length for _, length in self.spans)
        return Problem(
            case=self,
            segments=segments,
            query=draw(tokens, self.heads, self.dim).to(self.dtype),
            key=draw(tokens, self.kv_heads, self.dim).to(self.dtype),
            value=draw(tokens, self.kv_heads, value_dim).to(self.dtype),
            key_blocks=keys,
            value_blocks=values,
            sinks=draw(self.heads) if self.has_sinks else None,
        )


@dataclass(frozen=True)
class Problem:
    case: AttentionCase
    segments: Sequence[Segment]
    query: Tensor
    key: Tensor
    value: Tensor
    key_blocks: Tensor
    value_blocks: Tensor
    sinks: Tensor | None

    def copy(self) -> Problem:
        keys = torch.empty_like(self.key_blocks).copy_(self.key_blocks)
        return replace(self, key_blocks=keys, value_blocks=self.value_blocks.clone())

    @torch.inference_mode()
    def run(self, batch: AttentionBatch | None = None) -> Tensor:
        """Run the kernels, which write into this problem's pool."""
        return paged_attention(
            self.query,
            self.key,
            self.value,
            self.key_blocks,
            self.value_blocks,
            batch or AttentionBatch.build(self.segments, self.case.block_size, "cpu"),
            scale=self.case.dim**-0.5,
            window=self.case.window,
            soft_cap=self.case.soft_cap,
            sinks=self.sinks,
        )

    def expected(self) -> Tensor:
        return paged_attention_reference(
            self.query,
            self.key.to(self.key_blocks.dtype),
            self.value.to(self.value_blocks.dtype),
            self.key_blocks,
            self.value_blocks,
            self.segments,
            scale=self.case.dim**-0.5,
            window=self.case.window,
            soft_cap=self.case.soft_cap,
            sinks=self.sinks,
        )

    def error(self) -> float:
        expected = self.expected()
        return relative_error(self.run(), expected)
