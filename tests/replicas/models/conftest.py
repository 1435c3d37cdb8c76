"""Tiny models with random weights, and a KV pool to run them over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kernels.attention_batch import AttentionBatch, Segment
from kernels.pool_layout import transposed_keys
from replicas.models.hf_adapter import PagedModel

BLOCK_SIZE = 16


class Pool:
    """Finite junk wherever nothing was written; block 0 is zero."""

    def __init__(self, model: PagedModel, blocks: int = 12) -> None:
        spec = model.spec
        shape = (spec.num_layers, 2, blocks, spec.kv_heads, BLOCK_SIZE, spec.head_dim)
        self._memory = torch.full(shape, 1000.0, dtype=getattr(torch, spec.dtype))
        self._memory[:, :, 0] = 0.0

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        keys, values = self._memory[index]
        return transposed_keys(keys), values

    def scales(self, index: int) -> None:
        """None: the pool has the model's own element type."""


def run_paged(
    model: PagedModel, pool: Pool, parts: Sequence[tuple[Sequence[int], int, Sequence[int]]]
) -> Tensor:
    """All logits of one ragged step; a part is (token ids, start, block table)."""
    tokens = [token for ids, _, _ in parts for token in ids]
    positions = [start + i for ids, start, _ in parts for i in range(len(ids))]
    segments = [Segment(start, len(ids), tuple(blocks)) for ids, start, blocks in parts]
    return model.forward(
        torch.tensor(tokens),
        torch.tensor(positions),
        pool,
        AttentionBatch.build(segments, BLOCK_SIZE, "cpu"),
        torch.arange(len(tokens)),
    )


@pytest.fixture
def make_pool() -> Callable[[PagedModel], Pool]:
    return Pool


@pytest.fixture
def paged() -> Callable[..., Tensor]:
    return run_paged


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., tuple[PreTrainedModel, Path]]:
    """Builds a tiny model of a type, and saves it: (the model with eager attention, its folder)."""

    def build(model_type: str, **overrides: Any) -> tuple[PreTrainedModel, Path]:
        torch.manual_seed(0)
        settings = {
            "vocab_size": 101,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        config = AutoConfig.for_model(model_type, **(settings | overrides))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for parameter in model.parameters():  # far from zero, so that attention tells
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
        folder = tmp_path / model_type
        model.save_pretrained(folder)
        return model.eval().requires_grad_(False), folder

    return build
