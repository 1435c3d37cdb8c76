"""Takes a choice's blocks away: from whom, and whether its KV is kept on the host."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

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

    def __init__(self, kv: KVManager, policy: PreemptionPolicy, mode: PreemptionMode) -> None:
        self._kv = kv
        self._policy = policy
        self._mode = mode if kv.offloader is not None else PreemptionMode.RECOMPUTE
        self._costs = kv.costs

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

    def strip(self, choice: Choice) -> int:
        """Take all blocks of a running choice; gives the number of those kept on the host."""
        shared, own = self._on_device(choice)  # before copies hold its blocks as well
        if choice.arriving:  # it has nothing that the host has not: it just goes on waiting
            kept = self._kv.keep_on_host(choice)
            coming = len(choice.arriving) + len(choice.arrived)
            predicted_s = self._swap_s(choice, choice.num_found_blocks + coming, new_blocks=0)
        else:
            self._kv.hash_kept(choice)
            swap, predicted_s = self._decide(choice)
            kept = self._kv.swap_out(choice) if swap else 0
        choice.resume = Resume(
            swapped=kept > 0,
            predicted_s=predicted_s,
            insists=self._mode is PreemptionMode.SWAP and kept > 0,
            shared_blocks=shared,
            own_blocks=own,
        )
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
        """(swap, predicted seconds)."""
        size, full = self._kv.block_size, choice.num_kept_tokens // self._kv.block_size
        survivors = self._survivors(choice)
        recompute_s = self._costs.compute_s(choice.num_known_tokens - survivors * size)
        if self._mode is PreemptionMode.RECOMPUTE or full == 0:
            return False, recompute_s
        swap_s = self._swap_s(choice, full, new_blocks=self._kv.lacking_on_host(choice))
        if self._mode is PreemptionMode.SWAP or swap_s < recompute_s:
            return True, swap_s
        return False, recompute_s

    def _swap_s(self, choice: Choice, blocks: int, *, new_blocks: int) -> float:
        """Seconds until the choice is back if the host has its first `blocks`, `new_blocks` of
        which are to be written."""
        size, offloader = self._kv.block_size, self._kv.offloader
        assert offloader is not None, "without a host tier the mode is recompute"
        return self._costs.compute_s(choice.num_known_tokens - blocks * size) + self._costs.swap_s(
            new_blocks=new_blocks,
            blocks=max(0.0, blocks - self._survivors(choice)),
            block_tokens=size,
            queued_saves=offloader.num_queued_saves,
            queued_restores=offloader.num_queued_restores,
        )

    def _survivors(self, choice: Choice) -> float:
        """Blocks that the choice will find on the device, wherever else they are."""
        shared, own = self._on_device(choice)
        return shared + self._costs.found.value * own

    def _on_device(self, choice: Choice) -> tuple[int, int]:
        """Full leading blocks (that others hold as well and so stay, that are the choice's own and
        will be cached)."""
        full = choice.num_kept_tokens // self._kv.block_size
        shared = self._kv.leading_shared(choice, full)
        return shared, max(0, min(full, choice.num_published_blocks) - shared)
