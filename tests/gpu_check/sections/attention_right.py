"""Attention against float64: decode rows and prefill in one step, over every kind of head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tests.gpu_check.accuracy import Worst, dtypes, poisoned
from tests.gpu_check.contiguous import sdpa
from tests.gpu_check.items import ATTENTION_CHECKS
from tests.gpu_check.oracle import relative_error
from tests.gpu_check.paged import FP8, PLAIN, Options, PagedProblem
from tests.gpu_check.rig import Rig
from tests.gpu_check.shapes import Heads
from tests.gpu_check.targets import checked, exact

_WORSE_THAN_SDPA = 1.5
_OPTIONS = (
    PLAIN,
    Options(window=100),
    Options(soft_cap=20.0),
    Options(sinks=True),
    Options(window=33, soft_cap=5.0, sinks=True),
)
_SPANS = (
    *((0, 1), (63, 1), (64, 1), (299, 1), (2047, 1), (5000, 1)),
    *((0, 1), (0, 2), (0, 130), (64, 64), (700, 257), (4000, 70)),
)
"""Decode rows, then chunks: contexts of one token, at block boundaries, more splits than tiles."""
_SPANS_DRY = ((0, 1), (15, 1), (16, 1), (38, 1), (0, 2), (17, 18))


@dataclass(frozen=True, slots=True)
class Case:
    dtype: torch.dtype
    kv_dtype: torch.dtype
    heads: Heads
    block_size: int
    item: str

    def __str__(self) -> str:
        kind = "fp8 KV" if self.kv_dtype == FP8 else str(self.dtype).removeprefix("torch.")
        group = self.heads.query // self.heads.kv
        return f"{kind} D={self.heads.dim} G={group} block {self.block_size}"


def run(rig: Rig) -> None:
    """A row a type, then how SDPA fares beside us, and whether repeats agree."""
    worst = {item: Worst() for item in ATTENTION_CHECKS[:4]}
    ratio, ratio_name, differing, repeated = 0.0, "", 0, 0
    for case in cases(rig):
        problem, asked = problem_of(rig, case)
        step = problem.step(windows(asked))
        for options in asked:
            attend = partial(problem.attend, 0, step, options)
            found = poisoned(attend)
            expected = problem.expected(0, options)
            name = f"{case} {options}".strip()
            error = worst[case.item].see(found, expected, case.dtype, name)
            differing += not torch.equal(found, poisoned(attend))
            repeated += 1
            if options == PLAIN and case.dtype != torch.float32:
                beside = error / relative_error(_by_sdpa(problem), expected)
                ratio, ratio_name = max((ratio, ratio_name), (beside, name))
    for item, seen in worst.items():
        rig.recorder.add(seen.row(item))
    rig.recorder.add(
        checked(ATTENTION_CHECKS[4], ratio, _WORSE_THAN_SDPA, unit="x", note=f"worst: {ratio_name}")
    )
    rig.recorder.add(exact(ATTENTION_CHECKS[5], differing, repeated))


def problem_of(rig: Rig, case: Case) -> tuple[PagedProblem, tuple[Options, ...]]:
    """What is computed of a case."""
    problem = PagedProblem(
        rig,
        str(case),
        _SPANS_DRY if rig.small else _SPANS,
        case.heads,
        block_size=case.block_size,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype,
    )
    return problem, _options(rig, case)


def windows(options: Sequence[Options]) -> list[int | None]:
    """The distinct ones."""
    return list(dict.fromkeys(each.window for each in options))


def _options(rig: Rig, case: Case) -> tuple[Options, ...]:
    """All of them for one kind of heads, the extremes for the others."""
    if case.heads == Heads(32, 8, 128):
        return _OPTIONS
    return (PLAIN, Options(window=7, soft_cap=5.0, sinks=True)) if rig.dry else _OPTIONS[::4]


def cases(rig: Rig) -> Iterator[Case]:
    """Types times heads."""
    half, *_ = dtypes(rig)
    # Dot products of bfloat16 are wrong in the interpreter: in a dry run its row is float16's.
    types = (torch.float16, half, torch.float32)
    for item, dtype in zip(ATTENTION_CHECKS[:3], types, strict=True):
        for heads, block_size in _heads(rig):
            yield Case(dtype, dtype, heads, block_size, item)
    for heads, block_size in _heads(rig):
        yield Case(half, FP8, heads, block_size, ATTENTION_CHECKS[3])


def _heads(rig: Rig) -> tuple[tuple[Heads, int], ...]:
    """Head sizes and groups of real models, all block sizes among them."""
    if rig.dry:
        return ((Heads(2, 1, 64), 16),)
    return (
        (Heads(32, 8, 128), 64),
        (Heads(32, 32, 64), 16),
        (Heads(28, 4, 128), 64),
        (Heads(32, 32, 80), 32),
        (Heads(16, 2, 96), 128),
        (Heads(14, 2, 112), 64),
        (Heads(8, 1, 256), 64),
    )


def _by_sdpa(problem: PagedProblem) -> Tensor:
    """torch's answer to the plain problem, one segment after the other, in the same type."""
    outputs, first = [], 0
    for row, (_, length) in enumerate(problem.spans):
        query = problem.queries[0, first : first + length].transpose(0, 1)[None]
        keys, values = (
            part.to(problem.dtype).transpose(0, 1)[None] for part in problem.contiguous(0, row)
        )
        group = query.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        outputs.append(sdpa(query, keys, values, problem.scale)[0].transpose(0, 1))
        first += length
    return torch.cat(outputs)
