"""Sampling noise as a pure function of (seed, choice, output index).

A counter-based generator has no state to lose: whatever else is in the batch, whichever
replica runs the step and however often a choice is preempted, a token meets the same number.
"""

from __future__ import annotations

_ROUNDS = 10
_MASK = 0xFFFF_FFFF
_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_KEY_STEPS = (0x9E37_79B9, 0xBB67_AE85)

Counter = tuple[int, int, int, int]


def philox(counter: Counter, key: tuple[int, int]) -> Counter:
    """Philox 4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

    `counter`, `key` and the result are 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left = _MULTIPLIERS[0] * c0
        right = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (right >> 32) ^ c1 ^ k0,
            right & _MASK,
            (left >> 32) ^ c3 ^ k1,
            left & _MASK,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _MASK
        k1 = (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, output_index: int) -> float:
    """One multiple of 2^-53 in [0, 1).

    `seed` counts modulo 2^64, `choice` and `output_index` modulo 2^32.
    """
    counter = (choice & _MASK, output_index & _MASK, 0, 0)
    first, second, _, _ = philox(counter, (seed & _MASK, seed >> 32 & _MASK))
    return (first << 21 | second >> 11) * 2.0**-53
