"""What the sampling kernels share: weights, ranks and noise, as the engine's sampler defines them.

A token's weight is exp((score - peak) / temperature), rounded to a multiple of 2^-34 and counted
in these: sums of weights are exact in float64 in any order. A token's rank, a 64-bit number, is
higher for a higher score, and for the lower id among equal scores: what truncation keeps is
always the tokens whose rank reaches one threshold. The noise is that of `replicas.engine.noise`.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_VOCAB = 2**18
"""Ranks have 18 bits for token ids."""
SEGMENT = tl.constexpr(4096)
"""Tokens to a program; whole groups of the noise."""
PARTS = tl.constexpr(MAX_VOCAB // 4096)
"""Segments that a row has at most, and so the stride of what is kept for each."""
BINS = tl.constexpr(1024)
"""Bins of neighbouring weights. With more, Triton 3.6's histogram takes longer (3.9's does not);
with fewer, a bin has more candidates."""
GROUP = tl.constexpr(32)
"""Tokens that share a part of their noise."""
ONE = tl.constexpr(2.0**34)
"""The weight of the likeliest token."""
DEEPEST = tl.constexpr(24.5)
"""Where (score - peak) / temperature is further down than this, the weight is 0."""
NO_LIMIT = tl.constexpr(-(2**63))
"""The threshold that all ranks reach."""
_ID_STEP = tl.constexpr(2**18)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_WHOLE = tl.constexpr(2.0**23)
"""From here on every float32 is a whole number."""


@triton.jit
def load_scores(row, token_id, mask):
    """Scores at ids of a row; -inf outside of the mask and for NaN."""
    score = tl.load(row + token_id, mask=mask, other=float("-inf"))
    return tl.where(score == score, score, float("-inf"))


@triton.jit
def exponents(score, peak, temperature):
    """(score - peak) / temperature, rounded as IEEE 754 asks; no lower than -`DEEPEST`, which is
    also what an undefined one becomes."""
    exponent = tl.div_rn(score - peak, temperature)
    return tl.where(exponent > -DEEPEST, exponent, -DEEPEST)


@triton.jit
def weigh(exponent):
    """Weights, whole numbers in float32, of exponents >= -`DEEPEST`.

    exp is evaluated in float64 and so rounded to float32 as if it were exact, on any device: the
    hardware's own differs in the last bits.
    """
    power = tl.floor(exponent * _LOG2_E + 0.5)
    r = exponent.to(tl.float64) - power.to(tl.float64) * _LN_2
    # Taylor's series, |r| <= 0.35: the rest is below 2^-42.
    x = 1.0 / 3628800 * r + 1.0 / 362880
    x = x * r + 1.0 / 40320
    x = x * r + 1.0 / 5040
    x = x * r + 1.0 / 720
    x = x * r + 1.0 / 120
    x = x * r + 1.0 / 24
    x = x * r + 1.0 / 6
    x = x * r + 0.5
    x = x * r + 1.0
    x = x * r + 1.0
    scale = ((power.to(tl.int32) + (127 + 34)) << 23).to(tl.float32, bitcast=True)
    weight = x.to(tl.float32) * scale
    return tl.where(weight < _WHOLE, (weight + _WHOLE) - _WHOLE, weight)


@triton.jit
def rank_of(score, token_id):
    """int64; ids below 2^18."""
    # Both zeros are equal.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered.to(tl.int64) * _ID_STEP + (_ID_STEP - 1 - token_id)


@triton.jit
def score_of_key(key):
    """The score whose ranks are from key * 2^18 on; int64 -> float32."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def noise_word(counter, first, second):
    """The 32-bit word of a token or of a group, with the row's two keys for these."""
    x = counter.to(tl.uint32) ^ first
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    x = x ^ (x >> 16)
    return x ^ second


@triton.jit
def exponential(word):
    """Exponential noise with mean 1 in float64."""
    part = ((word >> 5).to(tl.float64) + 0.5) * (2.0**-27)
    # The difference is exact, so that small numbers keep their relative precision.
    return -tl.log(1.0 - part)
