"""An attention problem as the Triton kernels are handed it: a pool as it lies on a GPU, a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.attention_batch import Segment
from kernels.gpu.attention import attend
from kernels.gpu.attention_step import AttentionStep, StepArrays, plan_step
from kernels.gpu.split_plan import SplitPolicy
from kernels.reference import attention_reference, write_reference
from tests.kernels.attention_case import AttentionCase, Problem, relative_error

LAYERS, LAYER = 3, 1
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}
NAN = float("nan")


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Memory that is allocated here holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass(frozen=True)
class StepCase:
    """`case` has the segments of one token first. Whatever is no key or value of theirs is NaN,
    unless its `poison` says otherwise: free blocks, unused slots, the other layers."""

    case: AttentionCase
    tile_tokens: int = 8
    policy: SplitPolicy = field(default_factory=lambda: SplitPolicy(max_items=4))
    scales: tuple[Tensor, Tensor] | None = None
    """[kv_heads] each, by which stored keys and values are multiplied."""

    def problem(self) -> Problem:
        return self.case.build()

    def layer(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """One layer's views of a pool `[num_blocks, layers, 2, kv_heads, block_size, head_dim]`
        into which the new tokens are written."""
        shape = problem.key_blocks.shape
        pool = torch.full(
            (shape[0], LAYERS, 2, *shape[1:]), self.case.poison, dtype=problem.key_blocks.dtype
        )
        for index, (new, blocks) in enumerate(
            ((problem.key, problem.key_blocks), (problem.value, problem.value_blocks))
        ):
            written = write_reference(new.to(blocks.dtype), blocks, problem.segments)
            pool[:, LAYER, index] = written
        value_dim = problem.value.shape[2]
        return pool[:, LAYER, 0], pool[:, LAYER, 1][..., :value_dim]

    def plan(self, segments: Sequence[Segment], padded_rows: int | None = None) -> StepArrays:
        most = max(len(segment.blocks) for segment in segments)
        return plan_step(
            segments,
            self.case.block_size,
            (None, self.case.window),
            max_blocks=most + 1,
            tile_tokens=self.tile_tokens,
            policy=self.policy,
            padded_rows=padded_rows,
        )

    def run(
        self, problem: Problem, layer: tuple[Tensor, Tensor], padded_rows: int | None = None
    ) -> Tensor:
        """Attend in one step."""
        query = problem.query
        if padded_rows is not None:
            query = query.new_full((padded_rows, *query.shape[1:]), NAN)
            query[: len(problem.query)] = problem.query
        return self._attend(problem, layer, query, self.plan(problem.segments, padded_rows))

    def run_as(
        self,
        problem: Problem,
        layer: tuple[Tensor, Tensor],
        segments: Sequence[Segment],
        tokens: Sequence[int] | slice = slice(None),
    ) -> Tensor:
        """Attend with some of the problem's tokens, cut into other segments."""
        return self._attend(problem, layer, problem.query[tokens], self.plan(segments))

    def _attend(
        self, problem: Problem, layer: tuple[Tensor, Tensor], query: Tensor, arrays: StepArrays
    ) -> Tensor:
        step = AttentionStep.on(arrays, "cpu")
        k_scale, v_scale = self.scales or (None, None)
        with poisoned_outputs():
            return attend(
                query,
                *layer,
                step,
                scale=self.case.dim**-0.5,
                window=self.case.window,
                soft_cap=self.case.soft_cap,
                sinks=problem.sinks,
                k_scale=k_scale,
                v_scale=v_scale,
            )

    def expected(self, problem: Problem, layer: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = layer
        if self.scales is not None:
            keys, values = (
                blocks.double() * scale.view(1, -1, 1, 1)
                for blocks, scale in zip(layer, self.scales, strict=True)
            )
        return attention_reference(
            problem.query,
            keys,
            values,
            problem.segments,
            scale=self.case.dim**-0.5,
            window=self.case.window,
            soft_cap=self.case.soft_cap,
            sinks=problem.sinks,
        )

    def check(self) -> None:
        """Run it once and compare with the oracle."""
        problem = self.problem()
        layer = self.layer(problem)
        found = self.run(problem, layer)
        expected = self.expected(problem, layer)
        assert found.shape == expected.shape
        assert relative_error(found, expected) < TOLERANCE[self.case.dtype]
