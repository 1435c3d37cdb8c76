"""What the draws of a batch of rows depend on besides their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from replicas.engine.logit_processors import SampleRow
from replicas.engine.noise import key_tensor, row_key
from replicas.engine.weights import COLDEST


@dataclass(frozen=True, slots=True)
class DrawParams:
    """One entry a row in each tensor."""

    temperature: Tensor
    """[R] float32, at least `weights.COLDEST`."""
    top_k: Tensor
    """[R] int64, at least 1; the size of the vocabulary where it is off."""
    top_p: Tensor
    """[R] float64, as is the next."""
    min_p: Tensor
    keys: Tensor
    """[R, 2, 2] int64, of the noise."""

    @classmethod
    def of(cls, rows: Sequence[SampleRow], vocab_size: int, device: torch.device) -> DrawParams:
        """Those of `rows`."""

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        params = [row.sampling for row in rows]
        keys = [row_key(row.sampling.seed, row.choice, row.output_index) for row in rows]
        return cls(
            column([max(p.temperature, COLDEST) for p in params], torch.float32),
            column([min(p.top_k or vocab_size, vocab_size) for p in params], torch.int64),
            column([p.top_p for p in params], torch.float64),
            column([p.min_p for p in params], torch.float64),
            key_tensor(keys, device),
        )

    def __getitem__(self, rows: slice | Tensor) -> DrawParams:
        return DrawParams(*(getattr(self, field.name)[rows] for field in fields(self)))
