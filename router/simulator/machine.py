"""One replica's machine: a model on as many devices as it takes, and how long a step lasts."""

from __future__ import annotations

from dataclasses import dataclass

from replicas.core.cost_model import Rates
from replicas.core.scheduler_output import SchedulerOutput
from router.simulator.hardware import Hardware
from router.simulator.models import ModelShape

_GIB = 2**30
_MAX_DEGREE = 64
_PROBE_TOKENS = 2048
"""Of the prefill whose rate a replica begins with, as the engine's start-up probe measures."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A roofline: a step takes the longer of computing and of moving bytes, plus an overhead.

    Computing: 2 operations a parameter for each token (the logits' for drawn ones only), and
    attention's 4 * heads * head_dim * layers for each pair of a token and one it attends to.
    Bytes: the weights once a step, each choice's KV up to its last token, and the new KV.
    Activations and, with several devices, the exchange between them are left out.
    """

    model: ModelShape
    hardware: Hardware
    degree: int = 1
    """Devices that share the replica's weights and KV evenly (tensor parallel)."""

    @classmethod
    def fitting(cls, model: ModelShape, hardware: Hardware) -> Machine:
        """The least power of two of devices whose memory holds the weights and the KV of one
        choice of the model's full context."""
        machine = cls(model, hardware)
        while machine.kv_tokens < model.max_position and machine.degree < _MAX_DEGREE:
            machine = cls(model, hardware, machine.degree * 2)
        return machine

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside the weights."""
        memory = self.degree * self.hardware.memory_bytes * self.hardware.memory_share
        return max(0, int((memory - self.model.weight_bytes) // self.model.kv_bytes))

    @property
    def copy_bandwidth(self) -> float:
        """Bytes a second between device and host, each way."""
        return self.degree * self.hardware.host_bandwidth

    def block_bytes(self, block_size: int) -> int:
        return block_size * self.model.kv_bytes

    def host_blocks(self, swap_space_gib: float, block_size: int) -> int:
        """Blocks that a host tier of that size holds."""
        return int(swap_space_gib * _GIB // self.block_bytes(block_size))

    def rates(self) -> Rates:
        """What a start-up probe would measure."""
        seconds = self.seconds(_PROBE_TOKENS, _PROBE_TOKENS * (_PROBE_TOKENS + 1) // 2, 1, 0)
        return Rates(
            prefill_tokens=_PROBE_TOKENS / seconds,
            written_bytes=self.copy_bandwidth,
            read_bytes=self.copy_bandwidth,
        )

    def step_s(self, output: SchedulerOutput) -> float:
        """Seconds a step takes; 0 where it computes nothing."""
        tokens = pairs = draws = held = 0
        for item in output.scheduled:
            count = len(item.token_ids)
            tokens += count
            pairs += count * item.start + count * (count + 1) // 2
            held += item.start + count
            draws += len(item.draws)
        return self.seconds(tokens, pairs, draws, held) if tokens else 0.0

    def seconds(self, tokens: int, pairs: int, draws: int, held: int) -> float:
        """Seconds for a step of `tokens`, which attend to `pairs` positions in all, of which
        `draws` need logits, of choices with `held` tokens of KV at its end."""
        model, hardware = self.model, self.hardware
        linear = 2.0 * (tokens * model.layer_parameters + draws * model.head_parameters)
        attention = 4.0 * model.heads * model.head_dim * model.layers * pairs
        moved = (
            model.layer_bytes
            + (model.head_bytes if draws else 0)
            + model.kv_bytes * (held + tokens)
        )
        flops = self.degree * hardware.peak_flops * hardware.flops_share
        bandwidth = self.degree * hardware.bandwidth * hardware.bandwidth_share
        return max((linear + attention) / flops, moved / bandwidth) + hardware.overhead_s
