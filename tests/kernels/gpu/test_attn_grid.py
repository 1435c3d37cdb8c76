"""Decode and prefill against the oracle over head counts, widths and what models do to scores."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.attention_case import AttentionCase
from tests.kernels.gpu.step_case import NAN, StepCase

RAGGED = ((69, 1), (0, 1), (63, 1), (64, 1), (0, 9), (58, 13))
"""(start, length): decode within a block, of a first token, to both sides of a block boundary;
prefill from nothing and of a chunk that crosses one."""


def case(group: int, dim: int, **options: object) -> AttentionCase:
    defaults = {
        "spans": RAGGED,
        "heads": 2 * group,
        "kv_heads": 2,
        "dim": dim,
        "block_size": 64,
        "transposed": False,
        "poison": NAN,
    }
    return AttentionCase(**{**defaults, **options})


@pytest.mark.parametrize(
    ("group", "dim"),
    [(g, d) for g in (1, 4, 7, 8) for d in (64, 80, 96, 128, 256)],
)
def test_head_counts_and_widths(group: int, dim: int) -> None:
    spans = ((69, 1), (5, 9))
    StepCase(case(group, dim, spans=spans)).check()


@pytest.mark.parametrize("group", [16, 20, 70])
def test_many_heads_share_a_kv_head(group: int) -> None:
    """More than a tensor core's 16 rows; more than one program takes."""
    StepCase(case(group, 16, spans=((30, 1), (3, 4)))).check()


def test_values_may_be_narrower_than_keys() -> None:
    StepCase(case(2, 112, value_dim=64)).check()


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_block_sizes(block_size: int, dtype: torch.dtype) -> None:
    size = block_size
    spans = ((size - 1, 1), (size, 1), (size - 3, 7)) if size == 128 else RAGGED
    StepCase(case(4, 64, block_size=size, dtype=dtype, spans=spans)).check()


@pytest.mark.parametrize(
    "options",
    [
        {"window": 16},
        {"window": 70, "block_size": 16},
        {"soft_cap": 2.0},
        {"has_sinks": True},
        {"window": 9, "soft_cap": 3.0, "has_sinks": True, "block_size": 16},
        {"window": 1, "has_sinks": True, "dtype": torch.float16},
    ],
    ids=str,
)
def test_scores(options: dict[str, object]) -> None:
    StepCase(case(2, 64, **options), tile_tokens=4).check()
