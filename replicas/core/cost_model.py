"""What getting KV back costs, in seconds: computing it again, or copying it out and in.

The one place that knows prices: who preempts, spills or restores asks here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from replicas.core.step_time import StepTime

_MIN_PREFILL_SHARE = 0.05
"""Of a step that prefills: the estimate of its decoding part may be too high."""
_FADE_S = 600.0
"""Of steps, after which the seed weighs half in what is believed of copies. Who thinks them slow
or failing makes none, and would never learn that they have become better."""


@dataclass(slots=True)
class Ratio:
    """Part of a whole over the recent past: decayed sums of both.

    An observation's weight halves with every `half_life` of the whole that came after it, so
    that a few large observations outweigh many small and noisy ones.
    """

    half_life: float
    seed: float
    """The part of one of the whole before anything was seen. It is worth a `half_life`, and
    fades like any observation."""
    whole: float = field(init=False)
    part: float = field(init=False)

    def __post_init__(self) -> None:
        self.whole, self.part = self.half_life, self.half_life * self.seed

    def observe(self, whole: float, part: float) -> None:
        """`part` of `whole`, both at least 0."""
        decay = 0.5 ** (whole / self.half_life)
        self.whole = self.whole * decay + whole
        self.part = self.part * decay + part

    def fade(self, share: float) -> None:
        """Let the seed take the place of this share of what was seen."""
        self.part += share * (self.whole * self.seed - self.part)

    @property
    def value(self) -> float:
        """The part of one of the whole."""
        return self.part / self.whole


class Rate(Ratio):
    """Seconds of an amount."""

    @classmethod
    def seeded(cls, per_second: float, half_life: float) -> Rate:
        """A rate that begins at `per_second`."""
        return cls(half_life, 1.0 / per_second)

    def observe(self, whole: float, part: float) -> None:
        """An amount took so many seconds; what took no time says nothing."""
        if whole > 0 and part > 0:
            super().observe(whole, part)

    def seconds_for(self, amount: float) -> float:
        """What `amount` will take."""
        return amount * self.value

    @property
    def per_second(self) -> float:
        return 1.0 / self.value


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
    """Predicts from this replica's own steps and copies.

    A block that a copy loses is computed, and so is one that arrives behind it: its tokens are
    priced at twice the share that was lost lately.
    """

    block_bytes: int
    rates: Rates = field(default_factory=Rates)
    decode: StepTime = field(default_factory=StepTime)
    """Of steps that only decode."""
    prefill: Rate = field(init=False)
    write: Rate = field(init=False)
    read: Rate = field(init=False)
    lost_writes: Ratio = field(init=False)
    """Of blocks written to the host: those whose copies failed."""
    lost_reads: Ratio = field(init=False)
    found: Ratio = field(init=False)
    """Of a preempted choice's own cached blocks: those that it found on its return."""

    def __post_init__(self) -> None:
        blocks = 16.0
        self.prefill = Rate.seeded(self.rates.prefill_tokens, half_life=2048.0)
        self.write = Rate.seeded(self.rates.written_bytes, half_life=blocks * self.block_bytes)
        self.read = Rate.seeded(self.rates.read_bytes, half_life=blocks * self.block_bytes)
        self.lost_writes, self.lost_reads = Ratio(blocks, 0.0), Ratio(blocks, 0.0)
        self.found = Ratio(64.0, 0.0)

    def observe_step(self, prefill_tokens: int, decoding: int, seconds: float) -> float:
        """A step computed `prefill_tokens` for some choices and one token for `decoding` others.
        Gives the seconds that a prefilled token cost in it.

        What prefilling costs is the margin over a step that only decodes: the batch pays for
        reading the weights in any case.
        """
        share = 1.0 - 0.5 ** (seconds / _FADE_S)
        for each in (self.write, self.read, self.lost_writes, self.lost_reads):
            each.fade(share)
        if prefill_tokens == 0:
            if decoding:  # else it only waited for copies
                self.decode.observe(decoding, seconds)
            return 0.0
        decode_s = self.decode.of(decoding) if decoding else 0.0
        margin = max(seconds - decode_s, _MIN_PREFILL_SHARE * seconds)
        self.prefill.observe(prefill_tokens, margin)
        return margin / prefill_tokens

    def observe_write(self, blocks: int, seconds: float, lost: int = 0) -> None:
        """Copies of `blocks` to the host took `seconds` together; `lost` others failed."""
        self.write.observe(blocks * self.block_bytes, seconds)
        self.lost_writes.observe(blocks + lost, lost)

    def observe_read(self, blocks: int, seconds: float, lost: int = 0) -> None:
        """Copies of `blocks` from the host took `seconds` together; `lost` others failed."""
        self.read.observe(blocks * self.block_bytes, seconds)
        self.lost_reads.observe(blocks + lost, lost)

    def compute_s(self, tokens: float) -> float:
        """Seconds that prefilling `tokens` adds to a batch."""
        return self.prefill.seconds_for(tokens)

    def swap_s(
        self,
        *,
        new_blocks: int,
        blocks: float,
        block_tokens: int,
        queued_saves: int = 0,
        queued_restores: int = 0,
    ) -> float:
        """Seconds to write `new_blocks`, to read `blocks` later, and to compute what is lost on
        the way; first the queued copies end."""
        write_s = self.write.seconds_for((new_blocks + queued_saves) * self.block_bytes)
        queue_s = self.read.seconds_for(queued_restores * self.block_bytes)
        lost = new_blocks * self.lost_writes.value + blocks * self.lost_reads.value
        lost_s = self.compute_s(min(blocks, 2.0 * lost) * block_tokens)
        return write_s + queue_s + self.read.seconds_for(blocks * self.block_bytes) + lost_s

    def pays_to_restore(self, block_tokens: int) -> bool:
        """Whether to read a block from the host costs less than to compute its tokens. Queues do
        not count: who computes instead waits for others' prefills."""
        return self._copies_pay(0, block_tokens)

    def pays_to_spill(self, block_tokens: int) -> bool:
        """Whether to write a block now and to read it later costs less than to compute it."""
        return self._copies_pay(1, block_tokens)

    def _copies_pay(self, new_blocks: int, block_tokens: int) -> bool:
        swap_s = self.swap_s(new_blocks=new_blocks, blocks=1, block_tokens=block_tokens)
        return swap_s < self.compute_s(block_tokens)
