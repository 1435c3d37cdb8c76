"""What getting KV back costs, in seconds: computing it again, or copying it out and in."""

from __future__ import annotations

from dataclasses import dataclass, field

from replicas.core.step_time import StepTime

_MIN_PREFILL_SHARE = 0.05
"""Of a step that prefills: the estimate of its decoding part may be too high."""


@dataclass(slots=True)
class Rate:
    """Amount a second over the recent past: decayed sums of amounts and of seconds.

    An observation's weight halves with every `half_life` of amount that came after it, so that
    a few large observations outweigh many small and noisy ones.
    """

    half_life: float
    amount: float
    """Initially what the seed is worth: it fades like any observation."""
    seconds: float

    @classmethod
    def seeded(cls, per_second: float, half_life: float) -> Rate:
        """A rate that begins at `per_second`."""
        return cls(half_life, amount=half_life, seconds=half_life / per_second)

    def observe(self, amount: float, seconds: float) -> None:
        """`amount` took `seconds`; what took no time says nothing."""
        if amount <= 0 or seconds <= 0:
            return
        decay = 0.5 ** (amount / self.half_life)
        self.amount = self.amount * decay + amount
        self.seconds = self.seconds * decay + seconds

    def seconds_for(self, amount: float) -> float:
        """What `amount` will take."""
        return amount * self.seconds / self.amount

    @property
    def per_second(self) -> float:
        return self.amount / self.seconds


@dataclass(frozen=True, slots=True)
class Rates:
    """Where a cost model begins: a start-up probe's figures, or a guess at a modest machine."""

    prefill_tokens: float = 500.0
    """Tokens a second."""
    written_bytes: float = 2e9
    """Bytes a second, device to host."""
    read_bytes: float = 2e9
    """Bytes a second, host to device."""


@dataclass(slots=True)
class CostModel:
    """Predicts from this replica's own steps and copies."""

    block_bytes: int
    rates: Rates = field(default_factory=Rates)
    decode: StepTime = field(default_factory=StepTime)
    """Of steps that only decode."""
    prefill: Rate = field(init=False)
    write: Rate = field(init=False)
    read: Rate = field(init=False)

    def __post_init__(self) -> None:
        blocks = 16.0 * self.block_bytes
        self.prefill = Rate.seeded(self.rates.prefill_tokens, half_life=2048.0)
        self.write = Rate.seeded(self.rates.written_bytes, half_life=blocks)
        self.read = Rate.seeded(self.rates.read_bytes, half_life=blocks)

    def observe_step(self, prefill_tokens: int, decoding: int, seconds: float) -> float:
        """A step computed `prefill_tokens` for some choices and one token for `decoding` others.
        Gives the seconds that a prefilled token cost in it.

        What prefilling costs is the margin over a step that only decodes: the batch pays for
        reading the weights in any case.
        """
        if prefill_tokens == 0:
            if decoding:  # else it only waited for copies
                self.decode.observe(decoding, seconds)
            return 0.0
        decode_s = self.decode.of(decoding) if decoding else 0.0
        margin = max(seconds - decode_s, _MIN_PREFILL_SHARE * seconds)
        self.prefill.observe(prefill_tokens, margin)
        return margin / prefill_tokens

    def observe_write(self, blocks: int, seconds: float) -> None:
        """Copies of `blocks` to the host took `seconds` together."""
        self.write.observe(blocks * self.block_bytes, seconds)

    def observe_read(self, blocks: int, seconds: float) -> None:
        """Copies of `blocks` from the host took `seconds` together."""
        self.read.observe(blocks * self.block_bytes, seconds)

    def compute_s(self, tokens: int) -> float:
        """Seconds that prefilling `tokens` adds to a batch."""
        return self.prefill.seconds_for(tokens)

    def swap_s(self, *, new_blocks: int, blocks: int, queued_blocks: int) -> float:
        """Seconds to write `new_blocks` behind `queued_blocks`, and to read `blocks` later."""
        write_s = self.write.seconds_for((new_blocks + queued_blocks) * self.block_bytes)
        return write_s + self.read.seconds_for(blocks * self.block_bytes)
