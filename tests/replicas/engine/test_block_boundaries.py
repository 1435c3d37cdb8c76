"""Logits do not depend on where blocks end, nor on what lies behind the last token.

O23: block tables reach beyond the computed tokens, and free blocks hold large numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch, Segment
from replicas.engine.kv_pool import KVPool
from tests.replicas.engine.tiny_models import Twin, random_prompt

JUNK = 1000.0
TOLERANCE = 1e-4
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48)
DECODED = 3
"""Tokens computed one by one after the prefill of the others."""


class Bench:
    """A model over a pool of junk; each choice has a shuffled table with a block to spare."""

    def __init__(self, twin: Twin, block_size: int, lengths: Sequence[int]) -> None:
        self.twin = twin
        self.block_size = block_size
        sizes = [-(-length // block_size) + 1 for length in lengths]
        spec = twin.paged.spec
        self.pool = KVPool(
            spec,
            num_blocks=sum(sizes) + 2,
            block_size=block_size,
            dtype=torch.float32,
            device="cpu",
        )
        for layer in range(spec.num_layers):
            for blocks in self.pool.layer(layer):
                blocks[1:] = JUNK
        indices = iter(random.Random(block_size).sample(range(1, sum(sizes) + 3), sum(sizes)))
        self.tables = [tuple(next(indices) for _ in range(size)) for size in sizes]

    def compute(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> list[Tensor]:
        """Logits of the (choice, first position, token ids) of one step, a tensor each."""
        segments = [Segment(start, len(ids), self.tables[who]) for who, start, ids in parts]
        input_ids = torch.tensor([token for _, _, ids in parts for token in ids])
        positions = torch.cat([torch.arange(s.start, s.start + s.length) for s in segments])
        logits = self.twin.paged.forward(
            input_ids,
            positions,
            self.pool,
            AttentionBatch.build(segments, self.block_size, "cpu"),
            torch.arange(len(input_ids)),
        )
        return list(logits.split([segment.length for segment in segments]))


@pytest.fixture(scope="module")
def expected(llama: Twin) -> dict[int, Tensor]:
    return {length: llama.logits(random_prompt(length)) for length in LENGTHS}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert float((actual - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_prefill_of_all_lengths_in_one_batch(
    llama: Twin, expected: dict[int, Tensor], block_size: int
) -> None:
    bench = Bench(llama, block_size, LENGTHS)
    parts = [(who, 0, random_prompt(length)) for who, length in enumerate(LENGTHS)]
    for logits, length in zip(bench.compute(parts), LENGTHS, strict=True):
        assert_near(logits, expected[length])


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_chunks_that_end_on_boundaries_and_beside_them(
    llama: Twin, expected: dict[int, Tensor], block_size: int
) -> None:
    prompt = random_prompt(48)
    for chunk in (block_size, 5, 15, 16, 17):
        bench = Bench(llama, block_size, [48])
        found = [
            bench.compute([(0, start, prompt[start : start + chunk])])[0]
            for start in range(0, 48, chunk)
        ]
        assert_near(torch.cat(found), expected[48])


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_decode_over_boundaries(llama: Twin, expected: dict[int, Tensor], block_size: int) -> None:
    """All lengths decode together, those that are long enough, up to their last token."""
    lengths = [length for length in LENGTHS if length > DECODED]
    bench = Bench(llama, block_size, lengths)
    prompts = [random_prompt(length) for length in lengths]
    bench.compute([(who, 0, prompt[:-DECODED]) for who, prompt in enumerate(prompts)])
    for back in range(DECODED, 0, -1):
        parts = [(who, len(prompt) - back, (prompt[-back],)) for who, prompt in enumerate(prompts)]
        for logits, length in zip(bench.compute(parts), lengths, strict=True):
            assert_near(logits[0], expected[length][-back])


def test_the_reserved_block_is_never_written(llama: Twin) -> None:
    bench = Bench(llama, 8, LENGTHS)
    bench.compute([(who, 0, random_prompt(length)) for who, length in enumerate(LENGTHS)])
    bench.compute([(who, length, (5,)) for who, length in enumerate(LENGTHS)])
    for layer in range(llama.paged.spec.num_layers):
        assert all(bool((blocks[0] == 0).all()) for blocks in bench.pool.layer(layer))
