"""What an fp8 KV pool's elements are multiplied by."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


class KVScaleError(ValueError):
    """Scales that KV cannot be stored with; the message names them."""


@dataclass(frozen=True, slots=True)
class KVScales:
    """One scale for each layer, K or V, and kv head. A stored e4m3 number stands for itself times
    its scale."""

    keys: Tensor
    """[layers, kv_heads] float32."""
    values: Tensor
    """[layers, kv_heads] float32."""

    def __post_init__(self) -> None:
        """Raise KVScaleError unless all are positive and finite."""
        for name, scales in (("k_scale", self.keys), ("v_scale", self.values)):
            wrong = ~(scales.isfinite() & (scales > 0))
            if wrong.any():
                layer, head = wrong.nonzero()[0].tolist()
                raise KVScaleError(
                    f"{name} of layer {layer}, kv head {head} is {float(scales[layer, head]):g}: "
                    f"a scale is positive and finite"
                )

    @property
    def digest(self) -> str:
        """Hex; equal for equal scales, on every machine."""
        both = torch.stack((self.keys, self.values)).to("cpu", torch.float32).contiguous()
        return hashlib.blake2b(both.numpy().astype("<f4").tobytes(), digest_size=16).hexdigest()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(k_scale, v_scale), each [kv_heads] float32."""
        return self.keys[index], self.values[index]

    def to(self, device: str) -> KVScales:
        """The same on `device`."""
        return KVScales(self.keys.to(device), self.values.to(device))
