"""Keys and values as 8-bit floats: e4m3 (1 sign, 4 exponent, 3 mantissa bits; no infinities)
with one float32 scale for each kv head of a layer. A stored value stands for stored * scale.

Format: OCP 8-bit Floating Point Specification, revision 1.0, table 1 (E4M3).
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest finite value."""

_FP16_BITS = -0x4080
"""As int16 0xBF80: sign, the lower four exponent bits, the upper three mantissa bits."""
_BIAS = 2.0**8
"""float16 has an exponent bias of 15, e4m3 of 7."""
_NAN = 0x7F
_PART = 2**18
"""Elements widened at a time: what lies between stays in the cache, and takes little memory."""


def quantise(values: Tensor, scale: Tensor) -> Tensor:
    """`values` `[T, kv_heads, dim]` / `scale` `[kv_heads]` as e4m3, nearest even. What is out of
    range becomes +-448; NaN stays NaN."""
    scaled = values.to(torch.float32) / scale[:, None]
    # The cast alone saturates on some devices and gives NaN on others.
    return scaled.clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def movable(stored: Tensor) -> Tensor:
    """The same memory in an element type that torch can index on every device."""
    return stored.view(torch.uint8) if stored.dtype == FP8 else stored


def widen(source: Tensor, into: Tensor) -> Tensor:
    """Copy `source` into `into`, of the same shape and a wider element type; returns `into`.

    e4m3 on CPU is widened by its bits, as torch's own cast takes ten times as long (3 ns an
    element): shifted left by 7, a number is the float16 of 2**-8 times its value, subnormal ones
    too. Only NaN has no such twin, so parts that hold one are cast by torch.
    """
    if source.dtype != FP8 or source.device.type != "cpu":
        return into.copy_(source)
    step = max(1, _PART // source[0].numel())
    for begin in range(0, len(source), step):
        _widen_part(source[begin : begin + step], into[begin : begin + step])
    return into


def _widen_part(source: Tensor, into: Tensor) -> None:
    signed = source.view(torch.int8)
    if int(signed.bitwise_and(_NAN).amax()) == _NAN:
        into.copy_(source)
        return
    halves = signed.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_FP16_BITS)
    into.copy_(halves.view(torch.float16)).mul_(_BIAS)


def converted(source: Tensor, dtype: torch.dtype) -> Tensor:
    """`source.to(dtype)`, by `widen` where that is faster; `source` itself where nothing is to
    be done."""
    if source.dtype != FP8 or source.device.type != "cpu":
        return source.to(dtype)
    return widen(source, torch.empty_like(source, dtype=dtype))
