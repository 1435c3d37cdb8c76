"""The sampling parameters of a step's rows as arrays."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from replicas.engine import noise
from replicas.engine.array_layout import Array
from replicas.engine.logit_processors import Edits, SampleRow, changes_logits, edits_of
from replicas.engine.weights import COLDEST

_WORD_BITS = 32


def sample_arrays(
    rows: Sequence[SampleRow], vocab_size: int, eos_token_ids: Collection[int]
) -> dict[str, Array]:
    """For R rows:

    - `temperature` [R] float32, 0 for greedy; `top_k` [R] int32, `vocab_size` where it is off;
      `top_p`, `min_p` [R] float64; `noise_keys` [R, 4] int32, the words (a, b, c, d) of `noise`;
    - where rows have allowed tokens: `allowed_rows` [A] int32 and `allowed_words` [A, W] int32, a
      bit for each token, the lowest first;
    - where rows change logits otherwise: `edit_rows`, `edit_tokens` [E] int32, each pair once, and
      for it `edit_bias`, added first, `edit_penalty`, by which a positive score is divided and
      another multiplied, `edit_addend`, added last: [E] float32.
    """
    arrays = _draw_arrays(rows, vocab_size)
    allowed = [index for index, row in enumerate(rows) if row.sampling.allowed_token_ids]
    if allowed:
        words = [_bits(rows[index].sampling.allowed_token_ids, vocab_size) for index in allowed]
        arrays["allowed_rows"] = np.array(allowed, dtype=np.int32)
        arrays["allowed_words"] = np.stack(words)
    merged = [
        _merge(index, edits_of(row, eos_token_ids), vocab_size)
        for index, row in enumerate(rows)
        if changes_logits(row)
    ]
    if sum(len(part["edit_rows"]) for part in merged):
        for name in merged[0]:
            arrays[name] = np.concatenate([part[name] for part in merged])
    return arrays


def _draw_arrays(rows: Sequence[SampleRow], vocab_size: int) -> dict[str, Array]:
    params = [row.sampling for row in rows]
    temperature = np.array([max(p.temperature, COLDEST) if p.temperature else 0.0 for p in params])
    keys = noise.row_keys(
        np.array([p.seed & noise.SEED_MASK for p in params], dtype=np.uint64),
        np.array([row.choice for row in rows], dtype=np.int64),
        np.array([row.output_index for row in rows], dtype=np.int64),
    )
    return {
        "temperature": temperature.astype(np.float32),
        "top_k": np.array([min(p.top_k or vocab_size, vocab_size) for p in params], np.int32),
        "top_p": np.array([p.top_p for p in params], np.float64),
        "min_p": np.array([p.min_p for p in params], np.float64),
        "noise_keys": keys.view(np.int32),
    }


def _bits(token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.int32]:
    present = np.zeros(-(-vocab_size // _WORD_BITS) * _WORD_BITS, dtype=bool)
    known = np.array(token_ids, dtype=np.int64)
    present[known[(known >= 0) & (known < vocab_size)]] = True
    packed = np.packbits(present, bitorder="little")
    return packed.view("<u4").astype(np.uint32).view(np.int32)


def _merge(row: int, edits: Edits, vocab_size: int) -> dict[str, Array]:
    """One row's edits, each token once."""
    parts = (edits.bias, edits.repetition, edits.output)
    tokens = np.unique(np.concatenate([part.token_ids for part in parts]))
    tokens = tokens[(tokens >= 0) & (tokens < vocab_size)]
    merged: dict[str, Array] = {
        "edit_rows": np.full(len(tokens), row, dtype=np.int32),
        "edit_tokens": tokens.astype(np.int32),
    }
    for name, part, nothing in (
        ("edit_bias", edits.bias, 0.0),
        ("edit_penalty", edits.repetition, 1.0),
        ("edit_addend", edits.output, 0.0),
    ):
        values = np.full(len(tokens), nothing, dtype=np.float32)
        known = (part.token_ids >= 0) & (part.token_ids < vocab_size)
        values[np.searchsorted(tokens, part.token_ids[known])] = part.values[known]
        merged[name] = values
    return merged
