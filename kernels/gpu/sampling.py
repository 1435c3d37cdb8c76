"""From logits to tokens on the device, for one vocabulary."""

from __future__ import annotations

from torch import Tensor, device

from kernels import variants
from kernels.gpu import allow_only, edit_scores, sample
from kernels.gpu.sample import SampleParams
from kernels.gpu.sample_math import MAX_VOCAB


class TritonSampling:
    """What `dispatch.sampling` gives. All shapes are known once the vocabulary is, so that what
    may be launched is checked when it is made, and not again."""

    def __init__(self, vocab_size: int, device: device) -> None:
        """Raises ValueError where the kernels do not take so large a vocabulary, VariantError
        where they are not listed."""
        if vocab_size > MAX_VOCAB:
            raise ValueError(f"a vocabulary of {vocab_size} tokens, the limit is {MAX_VOCAB}")
        launches = (
            allow_only.launch(vocab_size=vocab_size),
            edit_scores.launch(vocab_size=vocab_size),
            *sample.launches(vocab_size),
        )
        variants.require_all(launches, device)
        self._vocab_size = vocab_size

    def allow_only(self, scores: Tensor, rows: Tensor, words: Tensor) -> None:
        """See `kernels.gpu.allow_only`."""
        self._check(scores)
        allow_only.allow_only(scores, rows, words)

    def edit(
        self,
        scores: Tensor,
        rows: Tensor,
        token_ids: Tensor,
        biases: Tensor,
        penalties: Tensor,
        addends: Tensor,
    ) -> None:
        """See `kernels.gpu.edit_scores`."""
        self._check(scores)
        edit_scores.edit_scores(scores, rows, token_ids, biases, penalties, addends)

    def sample(
        self,
        scores: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        keys: Tensor,
    ) -> Tensor:
        """Token ids [R] int64; see `kernels.gpu.sample`."""
        self._check(scores)
        return sample.sample(scores, SampleParams(temperature, top_k, top_p, min_p, keys))

    def _check(self, scores: Tensor) -> None:
        if scores.shape[-1] != self._vocab_size:
            raise ValueError(f"scores: {tuple(scores.shape)} is not [R, {self._vocab_size}]")
