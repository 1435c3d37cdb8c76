"""Attention that notes what it is asked for."""

from __future__ import annotations

from torch import Tensor

from replicas.models.hf_adapter import AttentionCall


class AttentionRecorder:
    """Notes the calls; the values, instead of their averages, are the output."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns [T, heads, value_dim]."""
        self.calls.append(call)
        return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)
