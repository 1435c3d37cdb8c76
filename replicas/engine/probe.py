"""A short look at what this replica can do, before it serves: where the cost model begins."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import inf

from replicas.core.block_transfer import OWN_SLAB, Restore, Save
from replicas.core.cost_model import Rates
from replicas.core.step_time import StepTime
from replicas.engine.host_copier import HostCopier
from replicas.engine.in_flight import Runner
from replicas.engine.kv_pool import KVPool
from replicas.engine.synthetic_steps import decode_step, prefill_step

_WARM_UP_TOKENS = 16
_TOKENS = 256
_CHOICES = 8
_REPETITIONS = 4
MAX_SLOTS = 4


def measure(
    runner: Runner,
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


def decode_steps(
    runner: Runner, pool: KVPool, *, max_choices: int, clock: Callable[[], float]
) -> StepTime:
    """Decode with one choice and with several, a block of context each."""
    many = min(_CHOICES, max_choices, pool.num_blocks)
    seconds: dict[int, float] = {}
    # The first of its size is no measure of what follows, and others may start beside this one.
    for choices in (1, many) * _REPETITIONS:
        begin = clock()
        _decode(runner, pool, choices)
        seconds[choices] = min(seconds.get(choices, inf), clock() - begin)
    return StepTime.measured(seconds[1], many, seconds[many])


def _per_second(amount: float, seconds: float, guess: float) -> float:
    return amount / seconds if seconds > 0 else guess


def _prefill(runner: Runner, pool: KVPool, tokens: int) -> None:
    blocks = -(-tokens // pool.block_size)
    runner.launch(prefill_step(tokens, range(1, blocks + 1))).result()


def _decode(runner: Runner, pool: KVPool, choices: int) -> None:
    tables = [(block,) for block in range(1, choices + 1)]
    runner.launch(decode_step(tables, pool.block_size - 1)).result()


def _seconds(copier: HostCopier, copies: Sequence[Save | Restore]) -> float:
    copier.start(copies)
    left, seconds = len(copies), 0.0
    while left:
        copier.wait(1.0)
        for each in copier.ended():
            left -= 1
            seconds += each.seconds
    return seconds
