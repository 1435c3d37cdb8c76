"""A step's rows as arrays, but for what attention needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from replicas.core.request import ChoiceKey
from replicas.engine.array_layout import Array
from replicas.engine.device_flight import Scored
from replicas.engine.step_inputs import StepInputs


def token_arrays(
    inputs: StepInputs, drawn_by: Mapping[ChoiceKey, int], padded_to: int | None = None
) -> dict[str, Array]:
    """`token_ids` and `positions` [T] int64, and `sources` [T] int64: which token of the step
    before takes the place of a PENDING one, -1 elsewhere. Padding is token 0 at position 0.

    Raises:
        ValueError: a PENDING token was not drawn by the step before; `drawn_by` numbers its draws.
    """
    length = len(inputs.token_ids) if padded_to is None else padded_to
    arrays = {
        "token_ids": np.zeros(length, dtype=np.int64),
        "positions": np.zeros(length, dtype=np.int64),
        "sources": np.full(length, -1, dtype=np.int64),
    }
    arrays["token_ids"][: len(inputs.token_ids)] = inputs.token_ids
    arrays["positions"][: len(inputs.positions)] = inputs.positions
    for row, key in inputs.pending:
        if key not in drawn_by:
            raise ValueError(f"the step before drew no token for {key}")
        arrays["sources"][row] = drawn_by[key]
    return arrays


def draw_arrays(
    inputs: StepInputs, scored: Scored, block_copies: Sequence[tuple[int, int]]
) -> dict[str, Array]:
    """`block_pairs` [N, 2], `draw_rows` [number of draws] and `scored_draws` [S], all int64 and
    left out where there is nothing to do: no copies, one draw for each row of logits in order,
    no draws that report logprobs."""
    arrays: dict[str, Array] = {}
    if block_copies:
        arrays["block_pairs"] = np.array(block_copies, dtype=np.int64)
    if inputs.draw_rows != list(range(len(inputs.logit_rows))):
        arrays["draw_rows"] = np.array(inputs.draw_rows, dtype=np.int64)
    if scored.groups:
        arrays["scored_draws"] = np.array(scored.numbers, dtype=np.int64)
    return arrays


def is_plain_decode(inputs: StepInputs) -> bool:
    """Whether each row is one new token whose logits are needed, and no prompt is scored."""
    rows = len(inputs.segments)
    everything = list(range(rows))
    return (
        len(inputs.token_ids) == rows
        and inputs.logit_rows == everything
        and not inputs.scores_prompts
    )
