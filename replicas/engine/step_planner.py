"""From the segments of a step to the arrays by which kernels attend to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kernels.attention_batch import Segment
from replicas.engine.array_layout import Array
from replicas.models.spec import ModelSpec

if TYPE_CHECKING:
    from kernels.gpu.attention_step import AttentionStep


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """What attention needs to know of one step."""

    arrays: Mapping[str, Array]
    """By name; to be copied to the device."""
    make: Callable[[Mapping[str, Tensor]], AttentionStep]
    """What the model's forward pass takes, from the arrays on the device."""


class StepPlanner(Protocol):
    """Plans steps whose segments of one new token come first."""

    def plan(self, segments: Sequence[Segment], padded_rows: int | None = None) -> PlannedStep:
        """With `padded_rows`, all segments have one new token, and rows without context follow
        until there are so many. All such plans have arrays of the same shapes."""
        ...


class TritonPlanner:
    """For `kernels.gpu`."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        block_size: int,
        kv_dtype: torch.dtype,
        max_blocks: int,
        device: torch.device,
    ) -> None:
        """`max_blocks` is the length of the longest block table.

        Raises:
            ValueError: the kernels do not take the model's shapes; the message names what.
        """
        from kernels.gpu.attention_shape import AttentionShape, device_arch
        from kernels.gpu.split_plan import SplitPolicy
        from kernels.gpu.tiles import max_items, prefill_tile

        shape = AttentionShape.of_model(
            num_heads=spec.num_heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            block_size=block_size,
            layers=spec.num_layers,
            query_dtype=getattr(torch, spec.dtype),
            pool_dtype=kv_dtype,
            arch=device_arch(device),
        )
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._windows = spec.windows
        self._tile_tokens = prefill_tile(shape).tokens(shape)
        self._policy = SplitPolicy(max_items=max_items(shape, _multiprocessors(device)))

    def plan(self, segments: Sequence[Segment], padded_rows: int | None = None) -> PlannedStep:
        """See `kernels.gpu.attention_step.plan_step`."""
        from kernels.gpu.attention_step import AttentionStep, plan_step

        longest = max((len(segment.blocks) for segment in segments), default=1)
        step = plan_step(
            segments,
            self._block_size,
            self._windows,
            max_blocks=longest if padded_rows is None else self._max_blocks,
            tile_tokens=self._tile_tokens,
            policy=self._policy,
            padded_rows=padded_rows,
        )
        return PlannedStep(step.arrays, lambda tensors: AttentionStep.of(step.sizes, tensors))


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
