"""Sampling where the logits are: what it needs from the host, and the kernels that do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from kernels import dispatch
from replicas.engine.array_layout import Array
from replicas.engine.logit_processors import SampleRow
from replicas.engine.sample_arrays import sample_arrays


class DeviceSampler(Protocol):
    """Draws the tokens that `Sampler` would draw, without waiting for the device."""

    def arrays(self, rows: Sequence[SampleRow]) -> dict[str, Array]:
        """What the draws of these rows depend on; to be copied to the device."""
        ...

    def draw(self, scores: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        """One token for each row of `scores` [R, V] float32, which may be changed: [R] int64."""
        ...


class TritonSampler:
    """With Triton's kernels, on `device`."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], device: str) -> None:
        """Raises ValueError where the kernels do not take the vocabulary."""
        self._kernels = dispatch.sampling(vocab_size, device)
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)

    def arrays(self, rows: Sequence[SampleRow]) -> dict[str, Array]:
        """See `sample_arrays`."""
        return sample_arrays(rows, self._vocab_size, self._eos_token_ids)

    def draw(self, scores: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        """Edits in place, then a draw."""
        if "allowed_rows" in arrays:
            self._kernels.allow_only(scores, arrays["allowed_rows"], arrays["allowed_words"])
        if "edit_rows" in arrays:
            self._kernels.edit(
                scores,
                arrays["edit_rows"],
                arrays["edit_tokens"],
                arrays["edit_bias"],
                arrays["edit_penalty"],
                arrays["edit_addend"],
            )
        return self._kernels.sample(
            scores,
            arrays["temperature"],
            arrays["top_k"],
            arrays["top_p"],
            arrays["min_p"],
            arrays["noise_keys"],
        )
