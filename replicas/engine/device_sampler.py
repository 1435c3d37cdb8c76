"""Sampling where the logits are: what it needs from the host, and the kernels that do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

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
    """With `kernels.gpu`."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Raises ValueError where the kernels do not take so large a vocabulary."""
        from kernels.gpu.sample_math import MAX_VOCAB

        if vocab_size > MAX_VOCAB:
            raise ValueError(f"a vocabulary of {vocab_size} tokens, the limit is {MAX_VOCAB}")
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)

    def arrays(self, rows: Sequence[SampleRow]) -> dict[str, Array]:
        """See `sample_arrays`."""
        return sample_arrays(rows, self._vocab_size, self._eos_token_ids)

    def draw(self, scores: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        """Edits in place, then a draw."""
        from kernels.gpu.allow_only import allow_only
        from kernels.gpu.edit_scores import edit_scores
        from kernels.gpu.sample import SampleParams, sample

        if "allowed_rows" in arrays:
            allow_only(scores, arrays["allowed_rows"], arrays["allowed_words"])
        if "edit_rows" in arrays:
            edit_scores(
                scores,
                arrays["edit_rows"],
                arrays["edit_tokens"],
                arrays["edit_bias"],
                arrays["edit_penalty"],
                arrays["edit_addend"],
            )
        params = SampleParams(
            arrays["temperature"],
            arrays["top_k"],
            arrays["top_p"],
            arrays["min_p"],
            arrays["noise_keys"],
        )
        return sample(scores, params)
