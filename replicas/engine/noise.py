"""Sampling noise: for each token its own, a pure function of (seed, choice, output index, token).

Counter-based noise has no state to lose: whatever else is in the batch, whichever replica runs
the step, whatever truncation leaves and however often a choice is preempted, a token meets the
same number. What follows is a contract: kernels, devices and versions that keep to it draw the
same tokens.

1. Philox 4x32-10 of the counter (choice, output index, 0, 0) under the key (seed mod 2^32,
   seed / 2^32) gives four words; the first two are the key (before, after) of the row.
2. The word of a token is fmix32(token id XOR before) XOR after, all of it arithmetic modulo
   2^32 with logical shifts:

       x ^= x >> 16; x *= 0x85EBCA6B; x ^= x >> 13; x *= 0xC2B2AE35; x ^= x >> 16

   fmix32, which permutes the 32-bit words, is the finaliser of MurmurHash3 (Austin Appleby,
   public domain; github.com/aappleby/smhasher, `MurmurHash3.cpp`). So no two tokens of a row
   have the same word, and any one token's word is uniform over `after`.
3. v = (word + 1/2) * 2^-32 is uniform in (0, 1), E = -log(1 - v) exponential with mean 1. Both
   need a small RELATIVE error where they are small, as the least of all E of a row decides.

torch has no unsigned 32-bit arithmetic, so that words are held as the int32 of the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ROUNDS = 10
_MASK = 0xFFFF_FFFF
_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_KEY_STEPS = (0x9E37_79B9, 0xBB67_AE85)
_MIX = (0x85EB_CA6B - 2**32, 0xC2B2_AE35 - 2**32)
"""The multipliers of fmix32 as int32."""

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


def row_key(seed: int, choice: int, output_index: int) -> tuple[int, int]:
    """What the noise of one draw's tokens is derived from, two 32-bit words.

    `seed` counts modulo 2^64, `choice` and `output_index` modulo 2^32.
    """
    counter = (choice & _MASK, output_index & _MASK, 0, 0)
    before, after, _, _ = philox(counter, (seed & _MASK, seed >> 32 & _MASK))
    return before, after


def key_tensor(keys: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Row keys -> [R, 2] int32, the same bits."""
    return torch.tensor(keys, dtype=torch.uint32, device=device).view(torch.int32)


def words(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Keys [R, 2] int32, token ids [C] or [R, C] -> [R, C] int32."""
    # The first step of fmix32 is linear in XOR: taken before the key and the ids are brought
    # together, it costs next to nothing.
    mixed = _xorshift_(token_ids.to(torch.int32, copy=True), 16) ^ _xorshift_(keys[:, :1].clone(), 16)
    _xorshift_(mixed.mul_(_MIX[0]), 13)
    _xorshift_(mixed.mul_(_MIX[1]), 16)
    return mixed.bitwise_xor_(keys[:, 1:])


def uniform(keys: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """v, [R, C] of a floating dtype; in float32 some are rounded to 1."""
    whole = words(keys, token_ids).view(torch.uint32).to(dtype)
    return whole.add_(0.5).mul_(2.0**-32)


def exponential(keys: Tensor, token_ids: Tensor) -> Tensor:
    """E, [R, C] float64: between 2^-33 and 22.9."""
    return uniform(keys, token_ids, torch.float64).neg_().log1p_().neg_()


def _xorshift_(word: Tensor, bits: int) -> Tensor:
    """word ^= word >> bits, in place; the shift is a logical one."""
    shifted = word >> bits
    shifted &= (1 << (32 - bits)) - 1
    word ^= shifted
    return word
