"""Paged attention problems on the device: a pool of many layers, of which each is other data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from kernels.attention_batch import Segment
from kernels.gpu import tiles
from kernels.gpu.attention import attend
from kernels.gpu.attention_shape import AttentionShape
from kernels.gpu.attention_step import AttentionStep, plan_step
from kernels.gpu.split_plan import SplitPolicy
from tests.gpu_check import oracle
from tests.gpu_check.rig import Rig
from tests.gpu_check.shapes import Heads

FP8 = torch.float8_e4m3fn
_FP8_MOST = 448.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a layer of a model may ask of attention besides."""

    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        parts = (f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name))
        return " ".join(parts)


PLAIN = Options()


class PagedProblem:
    """Segments `(start, length)` over scattered blocks. Block 0 is zero, and slots that no segment
    uses are NaN, which no kernel may let through."""

    def __init__(
        self,
        rig: Rig,
        name: str,
        spans: Sequence[tuple[int, int]],
        heads: Heads,
        *,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        layers: int = 1,
        turns: int = 1,
    ) -> None:
        """`turns` is in how many of the layers attention is to be computed."""
        self.spans, self.heads, self.block_size, self.dtype = spans, heads, block_size, dtype
        self.device, self.layers, self.turns = rig.device, layers, turns
        self.kv_dtype = kv_dtype or dtype
        generator = rig.seed(name)
        order = np.random.default_rng(len(name)).permutation(self._blocks_needed()) + 1
        self.segments = self._segments(order.tolist())
        self._scales = self._make_scales()
        self._pool = self._fill(generator)
        tokens = sum(length for _, length in spans)
        shape = (turns, tokens, heads.query, heads.dim)
        self.queries = torch.empty(shape, device=rig.device, dtype=dtype).normal_(
            generator=generator
        )
        self.sinks = torch.empty(heads.query, device=rig.device).normal_(generator=generator)
        self.scale = heads.dim**-0.5

    def key_blocks(self, layer: int) -> Tensor:
        """[num_blocks + 1, kv_heads, block_size, head_dim]"""
        return self._pool[:, layer, 0]

    def value_blocks(self, layer: int) -> Tensor:
        return self._pool[:, layer, 1]

    def _make_scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Of keys and of values, another for each head."""
        if self.kv_dtype != FP8:
            return None, None
        count = torch.arange(self.heads.kv, device=self.device, dtype=torch.float32)
        return 0.011 + 0.003 * count, 0.013 + 0.002 * count

    def contiguous(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[S, kv_heads, head_dim]` of one segment: in the pool's type, but fp8
        multiplied out, exactly, to float64."""
        start, length = self.spans[row]
        table = torch.tensor(self.segments[row].blocks, device=self.device)
        found = []
        parts = (self.key_blocks(layer), self.value_blocks(layer))
        for blocks, scale in zip(parts, self._scales, strict=True):
            gathered = (
                blocks.view(torch.uint8)[table].view(blocks.dtype)
                if scale is not None
                else (blocks[table])
            )
            tokens = gathered.transpose(1, 2).flatten(0, 1)[: start + length]
            if scale is not None:
                tokens = tokens.double() * scale.double()[:, None]
            found.append(tokens)
        return found[0], found[1]

    def step(self, windows: Sequence[int | None] = (None,)) -> AttentionStep:
        """The step's plan on the device, as the engine makes it."""
        shape = AttentionShape.of(self.queries[0], self.key_blocks(0), self.value_blocks(0))
        planned = plan_step(
            self.segments,
            self.block_size,
            windows,
            max_blocks=max(len(segment.blocks) for segment in self.segments),
            tile_tokens=tiles.prefill_tile(shape).tokens(shape),
            policy=SplitPolicy(tiles.max_items(shape, _multiprocessors(self.device))),
        )
        return AttentionStep.on(planned, self.device)

    def attend(self, layer: int, step: AttentionStep, options: Options = PLAIN) -> Tensor:
        """Our kernels' `[T, heads, head_dim]`."""
        k_scale, v_scale = self._scales
        return attend(
            self.queries[layer],
            self.key_blocks(layer),
            self.value_blocks(layer),
            step,
            scale=self.scale,
            window=options.window,
            soft_cap=options.soft_cap,
            sinks=self.sinks if options.sinks else None,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def expected(self, layer: int, options: Options) -> Tensor:
        """`[T, heads, head_dim]` float64."""
        outputs, first = [], 0
        for row, (start, length) in enumerate(self.spans):
            keys, values = self.contiguous(layer, row)
            outputs.append(
                oracle.attention(
                    self.queries[layer, first : first + length],
                    keys,
                    values,
                    start,
                    scale=self.scale,
                    window=options.window,
                    soft_cap=options.soft_cap,
                    sinks=self.sinks if options.sinks else None,
                )
            )
            first += length
        return torch.cat(outputs)

    def _blocks_needed(self) -> int:
        return sum(-(-(start + length) // self.block_size) for start, length in self.spans)

    def _segments(self, free: list[int]) -> list[Segment]:
        segments = []
        for start, length in self.spans:
            count = -(-(start + length) // self.block_size)
            segments.append(Segment(start, length, tuple(free[:count])))
            del free[:count]
        return segments

    def _fill(self, generator: torch.Generator) -> Tensor:
        blocks = self._blocks_needed() + 1
        shape = (blocks, self.layers, 2, self.heads.kv, self.block_size, self.heads.dim)
        pool = torch.empty(shape, dtype=self.kv_dtype, device=self.device)
        for block in range(0, blocks, 32):  # bounds what is held in a wider type
            self._fill_part(pool[block : block + 32], generator)
        pool.view(torch.uint8)[0] = 0
        for segment in self.segments:
            used = (segment.start + segment.length) % self.block_size
            if used:
                last = pool[segment.blocks[-1], ..., used:, :]
                last.copy_(torch.full(last.shape, torch.nan, device=self.device).to(self.kv_dtype))
        return pool

    def _fill_part(self, part: Tensor, generator: torch.Generator) -> None:
        drawn = torch.empty(part.shape, device=self.device, dtype=self.dtype)
        drawn.normal_(generator=generator)
        if self.kv_dtype != FP8:
            part.copy_(drawn)
            return
        for index, scale in enumerate(self._scales):
            assert scale is not None
            scaled = drawn[:, :, index].float() / scale[:, None, None]
            part[:, :, index] = scaled.clamp(-_FP8_MOST, _FP8_MOST).to(FP8)


def _multiprocessors(device: str) -> int:
    """Of the device; on a CPU few enough that short contexts are split."""
    if device == "cpu":
        return 4
    return int(torch.cuda.get_device_properties(0).multi_processor_count)
