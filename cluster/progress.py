"""What the replicas have sent of one request, whichever of them it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from replicas.protocol import (
    ChoiceProgress,
    FinishReason,
    GenerateRequest,
    Receipt,
    TokenDelta,
)


class _Choice:
    def __init__(self) -> None:
        self.output_token_ids: list[int] = []
        self.ended = False
        self.unwanted = False
        """The client has what it wants of it."""
        self.before = Receipt()
        """What it took on replicas that were lost, as far as they said."""
        self.receipt = Receipt()
        """What it took where it is served now."""

    def take(self, delta: TokenDelta) -> None:
        self.output_token_ids += delta.token_ids
        self.receipt = delta.receipt or self.receipt
        self.ended = delta.finish_reason is not None

    def move(self) -> None:
        self.before, self.receipt = _sum(self.before, self.receipt), Receipt()


class Progress:
    """Token ids of all choices as the engine drew them, so that another replica can go on.

    Beside the Journal, which knows what clients saw: an engine may be ahead of a stop string.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self._failovers = 0
        self._moves = 0
        self._placements: list[str] = []
        self._original = request
        self._choices = [_Choice() for _ in range(request.n)]

    @property
    def finished(self) -> bool:
        """Whether every choice has had its last delta."""
        return all(choice.ended for choice in self._choices)

    @property
    def output_tokens(self) -> int:
        """Of all choices so far."""
        return sum(len(choice.output_token_ids) for choice in self._choices)

    @property
    def has_unwanted(self) -> bool:
        """Whether a choice that nobody wants any more has not ended yet."""
        return any(choice.unwanted and not choice.ended for choice in self._choices)

    def take(self, deltas: Sequence[TokenDelta]) -> list[TokenDelta]:
        """Take note of deltas; gives them under the request's own id, receipts complete."""
        return [self._take(delta) for delta in deltas]

    def abort(self, index: int) -> None:
        """The client has what it wants of a choice: no replica needs to go on with it."""
        self._choices[index].unwanted = True

    def note_placement(self, hops: int, placement: str | None) -> None:
        """Why the replica after so many hops was chosen, where that is told."""
        if placement is not None and len(self._placements) <= hops:
            self._placements.append(placement)

    def request(self, number: int) -> GenerateRequest:
        """What to send to a replica now, for the `number`-th time: the original, with all that
        is known of its outputs."""
        if number == 0:
            return self._original
        data = replace(self._original, request_id=f"{self._original.request_id}/{number}")
        if not any(choice.output_token_ids or choice.ended for choice in self._choices):
            return data
        if self.output_tokens:  # the prompt's logprobs came with the first of them
            data = replace(data, sampling=replace(data.sampling, prompt_logprobs=None))
        return replace(
            data,
            progress=tuple(
                ChoiceProgress(tuple(choice.output_token_ids), finished=choice.ended)
                for choice in self._choices
            ),
        )

    def fail_over(self) -> list[TokenDelta]:
        """The replica was lost. Gives the last deltas of choices that nobody wants any more."""
        self._failovers += 1
        deltas = []
        for index, choice in enumerate(self._choices):
            if choice.unwanted and not choice.ended:
                last = TokenDelta(
                    self._original.request_id, index, (), finish_reason=FinishReason.ABORT
                )
                deltas.append(self._take(replace(last, receipt=choice.receipt)))
            choice.move()
        return deltas

    def move(self, stall_s: float) -> None:
        """Another replica goes on, as the one that had the request has had no room for it for
        so many seconds."""
        self._moves += 1
        for choice in self._choices:
            choice.move()
            if not choice.ended:
                choice.before = replace(choice.before, stall_s=choice.before.stall_s + stall_s)

    def _take(self, delta: TokenDelta) -> TokenDelta:
        choice = self._choices[delta.choice]
        choice.take(delta)
        if not (self._failovers or self._moves or self._placements):
            return delta
        receipt = delta.receipt
        if receipt is not None:
            receipt = replace(
                _sum(choice.before, receipt),
                failovers=self._failovers,
                moves=self._moves,
                placements=tuple(self._placements),
            )
        return replace(delta, request_id=self._original.request_id, receipt=receipt)


def _sum(first: Receipt, then: Receipt) -> Receipt:
    """Costs add up; what the first admission found and waited for stays what it was."""
    return replace(
        first,
        preemptions=first.preemptions + then.preemptions,
        swaps=first.swaps + then.swaps,
        recomputed_tokens=first.recomputed_tokens + then.recomputed_tokens,
        restored_tokens=first.restored_tokens + then.restored_tokens,
        stall_s=first.stall_s + then.stall_s,
        queue_s=first.queue_s + then.queue_s,
        cached_tokens=first.cached_tokens or then.cached_tokens,
        host_cached_tokens=first.host_cached_tokens or then.host_cached_tokens,
    )
