from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.attention_batch import AttentionBatch, Segment


def test_new_tokens_go_to_their_slots_in_order() -> None:
    segments = [Segment(6, 1, [3, 9]), Segment(2, 5, (5, 2)), Segment(0, 1, np.array([7, 8]))]
    batch = AttentionBatch.build(segments, 4, "cpu")
    assert batch.num_tokens == 7
    assert batch.token_blocks.tolist() == [9, 5, 5, 2, 2, 2, 7]
    assert batch.token_offsets.tolist() == [2, 2, 3, 0, 1, 2, 0]
    assert batch.token_blocks.dtype == torch.int64


def test_single_tokens_are_decoded_and_longer_segments_prefilled() -> None:
    segments = [Segment(6, 1, [3, 9, 4]), Segment(2, 5, [5, 2, 1]), Segment(0, 1, [7])]
    batch = AttentionBatch.build(segments, 4, "cpu")
    decode, (prefill,) = batch.decode, batch.prefill
    assert decode is not None
    assert decode.tokens.tolist() == [0, 6]
    assert decode.positions.tolist() == [6, 0]
    assert decode.tables[decode.first].tolist() == [3, 7]
    assert (prefill.tokens, prefill.start) == (slice(1, 6), 2)
    assert prefill.blocks.tolist() == [5, 2], "blocks beyond the segment are not read"


def test_a_step_without_decode_rows() -> None:
    batch = AttentionBatch.build([Segment(0, 2, [1])], 4, "cpu")
    assert batch.decode is None
    assert AttentionBatch.build([], 4, "cpu").num_tokens == 0


@pytest.mark.parametrize(
    ("start", "length", "blocks", "message"),
    [
        (0, 0, [1], "at least one new token"),
        (-1, 2, [1], "no negative start"),
        (0, 5, [1], "does not cover"),
        (4, 1, [1], "does not cover"),
        (0, 1, [], "does not cover"),
    ],
)
def test_impossible_segments(start: int, length: int, blocks: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionBatch.build([Segment(start, length, blocks)], 4, "cpu")
    AttentionBatch.build([Segment(3, 1, [1])], 4, "cpu")


def test_what_layers_share_is_made_once() -> None:
    batch = AttentionBatch.build([Segment(0, 1, [1])], 4, "cpu")
    calls: list[int] = []
    made = [batch.shared(key, lambda: calls.append(1) or object()) for key in ("a", "a", "b")]
    assert made[0] is made[1]
    assert made[1] is not made[2]
    assert len(calls) == 2
