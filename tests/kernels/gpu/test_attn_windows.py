"""Edges at which other engines saw one key too many: windows and ends of blocks."""

from __future__ import annotations

import pytest
import torch

from kernels.attention_batch import Segment
from tests.kernels.attention_case import AttentionCase, relative_error
from tests.kernels.gpu.step_case import StepCase

TOKENS = 40
BLOCK = 16


def whole(spans: tuple[tuple[int, int], ...], **options: object) -> StepCase:
    defaults = {"heads": 2, "kv_heads": 1, "dim": 32, "block_size": BLOCK, "transposed": False}
    return StepCase(AttentionCase(spans, **{**defaults, **options}))


@pytest.mark.parametrize("window", [1, 8, 16, 17])
def test_a_window_of_w_is_w_keys_in_prefill_chunks_and_decode(window: int) -> None:
    """Query p sees p - W + 1 .. p. (huggingface/transformers#29623: W in one implementation,
    W + 1 in another.)"""
    case = whole(((0, TOKENS),), window=window)
    problem = case.problem()
    layer = case.layer(problem)
    expected = case.expected(problem, layer)
    prefill = case.run(problem, layer)
    assert relative_error(prefill, expected) < 1e-5

    blocks = problem.segments[0].blocks
    chunks = [Segment(start, 5, blocks) for start in range(0, TOKENS, 5)]
    assert relative_error(case.run_as(problem, layer, chunks), expected) < 1e-5

    edges = [0, 6, 7, 8, 14, 15, 16, 17, 18, 31, 32, 33, 39]
    rows = [Segment(position, 1, blocks) for position in edges]
    decoded = case.run_as(problem, layer, rows, edges)
    assert relative_error(decoded, expected[edges]) < 1e-5
    assert relative_error(decoded, prefill[edges]) < 1e-5


def test_a_window_counts_keys() -> None:
    """With equal scores, an output is the mean of what its query sees."""
    for window in (1, 8, 16, 17):
        case = whole(((0, TOKENS),), window=window)
        problem = case.problem()
        problem.query.zero_()
        layer = case.layer(problem)
        values = problem.value[:, :1].double()
        means = torch.stack(
            [values[max(0, p - window + 1) : p + 1].mean(0) for p in range(TOKENS)]
        ).expand(-1, 2, -1)
        assert relative_error(case.run(problem, layer), means) < 1e-5


@pytest.mark.parametrize("block_size", [16, 32])
def test_free_blocks_do_not_count_where_a_sequence_fills_its_last(block_size: int) -> None:
    """Tables that name a further block already, as the next token will need it; free ones full
    of 1000. (pegainfer-project/pegainfer#291: a page of junk at each boundary.)"""
    size = block_size
    lengths = [size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 3 * size]
    spans = (*((length - 1, 1) for length in lengths), (0, size), (size - 5, 5), (size, size))
    results = []
    for poison in (1000.0, float("nan")):
        case = whole(spans, block_size=block_size, poison=poison)
        problem = case.problem()
        free = set(range(1, len(problem.key_blocks)))
        free -= {block for segment in problem.segments for block in segment.blocks}
        longer = [
            Segment(segment.start, segment.length, [*segment.blocks, free.pop()])
            for segment in problem.segments
        ]
        layer = case.layer(problem)
        results.append(case.run_as(problem, layer, longer))
        assert relative_error(results[-1], case.expected(problem, layer)) < 1e-5
    assert torch.equal(*results)


def test_blocks_outside_the_window_are_not_read() -> None:
    """They may have been freed, and be another sequence's by now."""
    case = whole(((70, 1), (60, 6)), window=20, poison=float("nan"))
    problem = case.problem()
    layer = case.layer(problem)
    expected = case.run(problem, layer)
    for segment in problem.segments:
        oldest = segment.start - 20 + 1
        for block in segment.blocks[: oldest // BLOCK]:
            for blocks in layer:
                blocks[block] = float("nan")
    assert torch.equal(case.run(problem, layer), expected)
