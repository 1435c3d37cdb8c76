"""When a waiting choice may start: room for it, and for what the running ones will need."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence

from replicas.core.kv_manager import KVManager
from replicas.core.request import Choice, ChoiceState

_OBSERVATIONS = 256
_ENOUGH = 8
_GUESS = 128


class OutputLengths:
    """How long outputs have been lately, and so how much a choice is likely to add."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def observe(self, length: int) -> None:
        """A choice ended by itself after `length` tokens."""
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > _OBSERVATIONS:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]

    def expected_remaining(self, produced: int, limit: int) -> float:
        """Tokens that a choice with `produced` outputs and `limit` at the most has to come: the
        mean over the observed lengths beyond what it has. Before there are enough, and for one
        that outlived most, as many again as it has, and a guess at the least."""
        left = limit - produced
        longer = self._sorted[bisect_right(self._sorted, produced) :]
        if len(longer) < _ENOUGH:
            return min(left, max(produced, _GUESS))
        return min(left, sum(longer) / len(longer) - produced)


class Admission:
    """Decides on one waiting choice at a time, and remembers preemptions.

    Eagerly, whoever fits now is admitted, but for a watermark. Looking ahead, the candidate is
    admitted if the expected PEAK of used blocks, with it, fits: choices end at different times,
    so the peak is the largest over these times of what those alive will hold then. The peak may
    exceed the pool by `overcommit`: a few cheap preemptions cost less than a pool that is full at
    the peak only. A preempted
    choice has waited enough: only its own fit counts for the hysteresis, which after a
    preemption keeps new ones out until `hysteresis` of the pool is free or a choice has ended.
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        look_ahead: bool,
        watermark: float,
        hysteresis: float,
        overcommit: float,
    ) -> None:
        """`watermark`, `hysteresis` and `overcommit` are shares of the pool."""
        blocks = kv.pool.num_blocks
        self._kv = kv
        self._look_ahead = look_ahead
        self._reserve = int(watermark * blocks)
        self._caution = max(self._reserve, int(hysteresis * blocks))
        self._limit_tokens = int((1.0 + overcommit) * blocks - self._reserve) * kv.block_size
        self._lengths = OutputLengths()
        self._cautious = False

    def note_preemption(self) -> None:
        """More was admitted than there was room for."""
        self._cautious = True

    def note_end(self, choice: Choice, *, by_itself: bool) -> None:
        """A choice is about to end: one that runs gives its blocks back."""
        if choice.state is ChoiceState.RUNNING:
            self._cautious = False
        if by_itself:
            self._lengths.observe(len(choice.output_token_ids))

    def reserve(self, choice: Choice) -> int:
        """Blocks that must stay free beside the choice's own."""
        return self._caution if self._cautious and not choice.returns else self._reserve

    def foresees_room(self, choice: Choice, running: Sequence[Choice]) -> bool:
        """Whether the pool will do until all of these have ended, as far as can be known."""
        if not self._look_ahead:
            return True
        pool, size = self._kv.pool, self._kv.block_size
        own = sum(len(each.blocks) - each.num_found_blocks for each in running)
        shared_tokens = (pool.num_used - own) * size
        alive = [(self.remaining(each), self._own_tokens(each)) for each in running]
        alive.append((self.remaining(choice), choice.num_known_tokens))
        for each in (*running, choice):
            alive += [(self.remaining(each), 0)] * self.unborn(each)
        peak = shared_tokens + _peak(alive, slack=size / 2)
        return peak <= self._limit_tokens

    def expected_tokens(self, running: Sequence[Choice]) -> float:
        """Output tokens that these choices, and those that will fork off them, have to come."""
        return sum(self.remaining(each) * (1 + self.unborn(each)) for each in running)

    def remaining(self, choice: Choice) -> float:
        """Output tokens that a choice is expected to have to come."""
        produced = len(choice.output_token_ids)
        return self._lengths.expected_remaining(produced, choice.sampling.max_tokens)

    def unborn(self, choice: Choice) -> int:
        """Choices that will fork off this one's prompt."""
        return 0 if choice.request.forked else len(choice.request.live_choices()) - 1

    def _own_tokens(self, choice: Choice) -> int:
        return choice.num_known_tokens - choice.num_found_blocks * self._kv.block_size


def _peak(alive: Sequence[tuple[float, int]], slack: float) -> float:
    """The most tokens held at any time by choices of (remaining, held) tokens, each of which
    grows by a token a step and vanishes at its end; `slack` is what each wastes."""
    held, peak = 0.0, 0.0
    for count, (remaining, tokens) in enumerate(sorted(alive, reverse=True), 1):
        held += tokens + slack
        peak = max(peak, held + count * remaining)
    return peak
