"""A short look at what this replica can do, before it serves: where the cost model begins."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from replicas.core.block_transfer import OWN_SLAB, Restore, Save
from replicas.core.cost_model import Rates
from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler_output import Draw, ScheduledChoice, SchedulerOutput
from replicas.engine.host_copier import HostCopier
from replicas.engine.kv_pool import KVPool
from replicas.engine.model_runner import ModelRunner

_WARM_UP_TOKENS = 16
_TOKENS = 256
MAX_SLOTS = 4


def measure(
    runner: ModelRunner,
    pool: KVPool,
    copier: HostCopier,
    *,
    max_tokens: int,
    free_slots: Sequence[int],
    clock: Callable[[], float],
) -> Rates:
    """Prefill and copy a little, on blocks that nobody holds yet.

    Args:
        max_tokens: of one step.
        free_slots: slots of the host store that hold nothing.
    """
    guess = Rates()
    tokens = min(_TOKENS, max_tokens, pool.num_blocks * pool.block_size)
    _prefill(runner, pool, min(_WARM_UP_TOKENS, tokens))
    begin = clock()
    _prefill(runner, pool, tokens)
    prefill_s = clock() - begin
    slots = free_slots[: min(MAX_SLOTS, pool.num_blocks)]
    if not slots:
        return Rates(
            _per_second(tokens, prefill_s, guess.prefill_tokens),
            guess.written_bytes,
            guess.read_bytes,
        )
    moved = len(slots) * pool.block_bytes
    saves = [Save(block, slot, random.randbytes(16)) for block, slot in enumerate(slots, 1)]
    restores = [Restore((OWN_SLAB, s.slot), s.block, s.digest) for s in saves]
    # The first touch of memory is no measure of what follows.
    _seconds(copier, saves)
    written_s, read_s = _seconds(copier, saves), _seconds(copier, restores)
    return Rates(
        _per_second(tokens, prefill_s, guess.prefill_tokens),
        _per_second(moved, written_s, guess.written_bytes),
        _per_second(moved, read_s, guess.read_bytes),
    )


def _per_second(amount: float, seconds: float, guess: float) -> float:
    return amount / seconds if seconds > 0 else guess


def _prefill(runner: ModelRunner, pool: KVPool, tokens: int) -> None:
    blocks = -(-tokens // pool.block_size)
    runner.run(
        SchedulerOutput(
            scheduled=(
                ScheduledChoice(
                    key=("", 0),
                    epoch=0,
                    start=0,
                    token_ids=(0,) * tokens,
                    blocks=tuple(range(1, blocks + 1)),
                    sampling=SamplingParams(1, 0, temperature=0.0),
                    prompt_token_ids=(0,) * tokens,
                    # A drawn token is waited for: else a GPU would only have been told to compute.
                    draws=(Draw(("", 0), output_index=0, output_token_ids=()),),
                ),
            ),
            block_copies=(),
            num_preempted=0,
        )
    )


def _seconds(copier: HostCopier, copies: Sequence[Save | Restore]) -> float:
    copier.start(copies)
    left, seconds = len(copies), 0.0
    while left:
        copier.wait(1.0)
        for each in copier.ended():
            left -= 1
            seconds += each.seconds
    return seconds
