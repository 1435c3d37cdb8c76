"""Takes a choice's blocks away: from whom, and whether its KV is kept on the host."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from replicas.core.cost_model import CostModel
from replicas.core.kv_manager import KVManager
from replicas.core.preemption.policy import Candidate, PreemptionPolicy
from replicas.core.request import Choice, Resume


class PreemptionMode(StrEnum):
    """How a preempted choice is to get its KV back."""

    AUTO = "auto"
    """Whichever is predicted to cost less."""
    RECOMPUTE = "recompute"
    SWAP = "swap"


class Preempter:
    """Chooses victims and strips them. To resume is not its business: that is a prefix hit, on
    the device or on the host, and prefill of what is missing."""

    def __init__(
        self, kv: KVManager, policy: PreemptionPolicy, mode: PreemptionMode, costs: CostModel
    ) -> None:
        self._kv = kv
        self._policy = policy
        self._mode = mode if kv.offloader is not None else PreemptionMode.RECOMPUTE
        self._costs = costs

    def choose(self, candidates: Sequence[Choice]) -> Choice | None:
        """The victim; None where there is no candidate.

        One whose blocks are all shared, or held by copies, gives nothing back, and is taken
        only where every other is like it: its going may leave a block to a single holder.
        """
        left = [self._candidate(choice) for choice in candidates]
        first: Candidate | None = None
        while left:
            pick = self._policy.choose(left)
            if pick.freed_blocks() > 0:
                return pick.choice
            first = first or pick
            left.remove(pick)
        return first.choice if first else None

    def strip(self, choice: Choice, now: float) -> int:
        """Take all blocks of a running choice; gives the number of those kept on the host."""
        if choice.arriving:  # it has nothing that the host has not: it just goes on waiting
            kept = self._kv.keep_on_host(choice)
            predicted_s = self._costs.swap_s(new_blocks=0, blocks=kept, queued_blocks=0)
        else:
            self._kv.hash_kept(choice)
            swap, predicted_s = self._decide(choice)
            kept = self._kv.swap_out(choice) if swap else 0
        choice.resume = Resume(swapped=kept > 0, predicted_s=predicted_s, preempted_at=now)
        choice.swaps += kept > 0
        self._kv.release(choice)
        choice.preemptions += 1
        return kept

    def _candidate(self, choice: Choice) -> Candidate:
        return Candidate(
            choice,
            freed_blocks=lambda: self._kv.freed_by(choice),
            cost_s=lambda: self._cost_s(choice),
        )

    def _cost_s(self, choice: Choice) -> float:
        self._kv.hash_kept(choice)
        return self._decide(choice)[1]

    def _decide(self, choice: Choice) -> tuple[bool, float]:
        """(swap, predicted seconds). What others hold survives on the device either way."""
        costs, size = self._costs, self._kv.block_size
        full = choice.num_kept_tokens // size
        survivors = self._kv.leading_shared(choice, full)
        recompute_s = costs.compute_s(choice.num_known_tokens - survivors * size)
        if self._mode is PreemptionMode.RECOMPUTE or self._kv.offloader is None or full == 0:
            return False, recompute_s
        swap_s = costs.compute_s(choice.num_known_tokens - full * size) + costs.swap_s(
            new_blocks=self._kv.lacking_on_host(choice),
            blocks=full - survivors,
            queued_blocks=self._kv.offloader.num_queued_saves,
        )
        if self._mode is PreemptionMode.SWAP or swap_s < recompute_s:
            return True, swap_s
        return False, recompute_s
