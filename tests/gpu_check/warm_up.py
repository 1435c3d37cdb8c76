"""What the sections launch, in parts that can be compiled side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.gpu_check import engine_kernels
from tests.gpu_check.attention_bench import decode_problem, prefill_problem
from tests.gpu_check.model_sizes import SIZE_1B, SIZE_8B
from tests.gpu_check.paged import PLAIN
from tests.gpu_check.rig import Rig
from tests.gpu_check.sample_problem import draw_from
from tests.gpu_check.sections import (
    attention_right,
    elementwise_fast,
    elementwise_right,
    sampling_right,
)
from tests.gpu_check.shapes import DECODES, PREFILLS, SAMPLE_VOCAB, Decode

Part = Callable[[Rig], object]


def parts(rig: Rig) -> list[Part]:
    """Each takes a rig that compiles only; the longest come first."""
    cases = [partial(_attention, case=case) for case in attention_right.cases(rig)]
    vocabularies = (SAMPLE_VOCAB, sampling_right.VOCABULARY, SIZE_1B.vocabulary, SIZE_8B.vocabulary)
    samples = [partial(draw_from, vocabulary=size) for size in vocabularies]
    decodes = {decode.fp8: decode for decode in DECODES}.values()
    benches = [partial(_decode, decode=decode) for decode in decodes]
    engines = engine_kernels.parts(rig)
    kernels = (*elementwise_fast.PARTS, *elementwise_right.PARTS)
    return [*cases, *engines, *samples, *benches, _prefill, *kernels]


def _attention(rig: Rig, case: attention_right.Case) -> None:
    problem, options = attention_right.problem_of(rig, case)
    step = problem.step(attention_right.windows(options))
    for each in options:
        problem.attend(0, step, each)


def _decode(rig: Rig, decode: Decode) -> None:
    problem = decode_problem(rig, decode)
    problem.attend(0, problem.step(), PLAIN)


def _prefill(rig: Rig) -> None:
    problem = prefill_problem(rig, PREFILLS[0])
    problem.attend(0, problem.step(), PLAIN)
