"""Sampling noise: a number for each token, as a pure function of (seed, choice, output index,
token id).

Counter-based noise has no state to lose: whatever else is in the batch, whichever replica runs
the step, whatever truncation leaves and however often a choice is preempted, a token meets the
same number. What follows is a contract: kernels, devices and versions that keep to it draw the
same tokens. Words have 32 bits, arithmetic is modulo 2^32, shifts are logical.

1. Philox 4x32-10 of the counter (choice, output index, 0, 0) under the key (low, high word of
   the seed) gives four words: the row's keys (a, b) for tokens and (c, d) for groups of them.
2. A token's word is mix(id ^ a) ^ b, its group's mix(id / 32 ^ c) ^ d. mix is fmix32, the
   finaliser of MurmurHash3 (Austin Appleby, public domain, `src/MurmurHash3.cpp` in
   github.com/aappleby/smhasher), without its first step x ^= x >> 16, which is linear and so
   would only rename the random keys:

       x *= 0x85EBCA6B;  x ^= x >> 13;  x *= 0xC2B2AE35;  x ^= x >> 16

3. e(word) = -log(1 - v), where v = (word / 32 + 1/2) * 2^-27 and the division drops five bits,
   is exponential with mean 1. It needs a small RELATIVE error where it is small.
4. The lowest five bits of the group's word say which of its tokens leads. The leader's noise is
   e(group's word) / 32, that of any other token is e(group's word) / 32 + e(token's word).

So all tokens' numbers are exponential with mean 1 and independent: the least of 32 such numbers
is exponential with mean 1/32, each of them is equally likely to be it, and by how much the others
exceed it is exponential with mean 1 again (A. Rényi, "On the theory of order statistics", 1953).
Whoever looks for the least numbers of a vocabulary can pass over most groups unseen (`race.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GROUP = 32
"""Tokens to a group; the first one's id is a multiple of it."""
_GROUP_BITS = 5
_ROUNDS = 10
_MASK = 0xFFFF_FFFF
SEED_MASK = 0xFFFF_FFFF_FFFF_FFFF
_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_KEY_STEPS = (0x9E37_79B9, 0xBB67_AE85)

Words = tuple[int, int, int, int]


def philox(counter: Words, key: tuple[int, int]) -> Words:
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


def row_key(seed: int, choice: int, output_index: int) -> Words:
    """(a, b, c, d) of one draw.

    `seed` counts modulo 2^64, `choice` and `output_index` modulo 2^32.
    """
    counter = (choice & _MASK, output_index & _MASK, 0, 0)
    return philox(counter, (seed & _MASK, seed >> 32 & _MASK))


def row_keys(
    seeds: npt.NDArray[np.uint64], choices: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint32]:
    """`row_key` of R rows at once: [R, 4]. Seeds are below 2^64."""
    mask, half = np.uint64(_MASK), np.uint64(32)
    zero = np.zeros(len(seeds), dtype=np.uint64)
    c0, c1, c2, c3 = choices.astype(np.uint64) & mask, indices.astype(np.uint64) & mask, zero, zero
    k0, k1 = seeds & mask, seeds >> half
    for _ in range(_ROUNDS):
        # A product of two words fits 64 bits.
        left, right = np.uint64(_MULTIPLIERS[0]) * c0, np.uint64(_MULTIPLIERS[1]) * c2
        c0, c1 = (right >> half) ^ c1 ^ k0, right & mask
        c2, c3 = (left >> half) ^ c3 ^ k1, left & mask
        k0, k1 = (k0 + np.uint64(_KEY_STEPS[0])) & mask, (k1 + np.uint64(_KEY_STEPS[1])) & mask
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def key_tensor(keys: Sequence[Words], device: torch.device) -> Tensor:
    """`row_key` of R rows -> [R, 2, 2] int64: (a, b) and (c, d)."""
    return torch.tensor(keys, dtype=torch.int64, device=device).view(-1, 2, 2)


def of_tokens(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Keys [R, 2, 2] and token ids [R, C] int64 -> the tokens' noise, [R, C] float64."""
    words = _words(keys[..., None], torch.stack((token_ids, token_ids >> _GROUP_BITS), dim=1))
    beyond, shared = _negative(words).unbind(1)
    # Where the two differ in their last bits, the token does not lead.
    follows = (words[:, 1] ^ token_ids).bitwise_and_(GROUP - 1) != 0
    return beyond.mul_(follows).add_(shared, alpha=1 / GROUP).neg_()


def of_leaders(keys: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Keys [R, 2, 2] -> the noise [R, G] float64 and the ids [R, G] int64 of the groups' leaders.

    That of the last group may lie beyond the vocabulary.
    """
    index = torch.arange(groups, device=keys.device)
    words = _words(keys[:, 1, :, None], index)
    leaders = (words & (GROUP - 1)).add_(index, alpha=GROUP)
    return _negative(words).mul_(-1 / GROUP), leaders


def _words(keys: Tensor, counters: Tensor) -> Tensor:
    """Keys [..., 2, 1] and counters [..., C], both within 32 bits -> [..., C] int64."""
    # A product of words overflows, but its low half is right.
    words = (counters ^ keys[..., 0, :]).mul_(0x85EB_CA6B).bitwise_and_(_MASK)
    words ^= words >> 13
    words.mul_(0xC2B2_AE35).bitwise_and_(_MASK)
    words ^= words >> 16
    words ^= keys[..., 1, :]
    return words


def _negative(words: Tensor) -> Tensor:
    """-e, in float64."""
    return (words >> _GROUP_BITS).double().add_(0.5).mul_(-(2.0**-27)).log1p_()
