"""One request on its way from replica to replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.lanes import Attempt, Lane, first_of
from cluster.losses import Losses
from cluster.openai.service import BackendError
from cluster.pauses import Pauses
from cluster.progress import Progress
from replicas.protocol import GenerateRequest, TokenDelta

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 8.0
"""Between two rivals that came to nothing. To ask costs the router milliseconds for a long prompt,
and what it would find changes as requests end: seconds apart."""


class ReplicaLost(BackendError):  # noqa: N818 - a condition, not a fault
    """The replica died, or its engine did: what it had not sent must come from another."""

    def __init__(self, message: str, replica: str | None = None) -> None:
        super().__init__(message)
        self.replica = replica
        """Where the request was, if that is known."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Who may serve an attempt."""

    avoid: frozenset[str] = frozenset()
    """Not these replicas."""
    patience_s: float | None = None
    """One that accepts it within so many seconds; None waits as long as it takes."""
    within_s: float | None = None
    """One that would be as quick as that, or none; None takes the best."""


class Dispatcher(Protocol):
    """Sends requests to replicas."""

    def attempt(self, request: GenerateRequest, conditions: Conditions) -> Attempt:
        """Prepare a try; it begins when its deltas are asked for."""


@dataclass(frozen=True, slots=True)
class FollowLimits:
    """How far a request is followed."""

    max_failovers: int
    """Replicas that may be lost under it in a row; see Losses."""
    patience_s: float
    """What a request that lost its replica waits for another to accept it, seconds."""
    max_moves: int
    """Times that it may leave a replica which has no room for it."""
    move_gain: float
    """It tries to leave where going on elsewhere takes less than its wait divided by this."""


class Follower:
    """Follows a request until it is complete.

    Beside the attempt that serves it there may be a rival: while a preempted request waits for
    KV, another replica gets to work on it as well, and the first of the two to deliver anything
    serves it from then on. So nothing is delivered twice, and a move that comes to nothing costs
    the client nothing.
    """

    def __init__(
        self, request: GenerateRequest, dispatcher: Dispatcher, limits: FollowLimits
    ) -> None:
        self.failovers = 0
        self.moves = 0
        self._request = request
        self._dispatcher = dispatcher
        self._limits = limits
        self._progress = Progress(request)
        self._losses = Losses(request.n)
        self._tries = 0
        self._main = self._begin(Conditions())
        self._rival: Lane | None = None
        self._waits_since: float | None = None
        self._pauses = Pauses(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    @property
    def finished(self) -> bool:
        """Whether every choice has had its last delta."""
        return self._progress.finished

    @property
    def output_tokens(self) -> int:
        """Of all choices so far."""
        return self._progress.output_tokens

    async def step(self) -> list[TokenDelta]:
        """Wait for something to happen; gives what there is for the client, perhaps nothing.

        Raises:
            BackendError: the request failed, or as many replicas as allowed did.
        """
        rival = self._rival
        lane = self._main if rival is None else await first_of([self._main, rival])
        try:
            deltas = await lane.take()
        except ReplicaLost as lost:
            return await self._lose(lane, lost)
        except BackendError:
            if lane is self._main:
                raise
            deltas = None
        if lane is not self._main:
            return await self._rival_brought(deltas)
        if deltas is None:
            raise BackendError("the replica ended the request before it was complete")
        return await self._main_brought(deltas)

    def abort(self, choice: int) -> None:
        """End one choice; its last delta still follows."""
        self._progress.abort(choice)
        self._main.attempt.abort(choice)
        if self._rival is not None:
            self._rival.attempt.abort(choice)

    async def close(self) -> None:
        """Abort what still runs."""
        await self._drop_rival()
        await self._main.close()

    def _begin(self, conditions: Conditions) -> Lane:
        number, self._tries = self._tries, self._tries + 1
        return Lane(self._dispatcher.attempt(self._progress.request(number), conditions))

    async def _main_brought(self, deltas: Sequence[TokenDelta]) -> list[TokenDelta]:
        self._progress.note_placement(self.failovers + self.moves, self._main.attempt.placement)
        told = self._progress.take(deltas)
        news = [delta for delta in told if delta.wait_s is None]
        waits = [delta.wait_s for delta in told if delta.wait_s is not None]
        if news:
            self._waits_since = None
            self._pauses.reset()
            await self._drop_rival()
        elif waits and self._may_move:
            if self._waits_since is None:
                self._waits_since = _now()
            here = self._main.attempt.replica
            self._rival = self._begin(
                Conditions(
                    avoid=self._losses.replicas | ({here} if here else frozenset()),
                    within_s=max(waits) / self._limits.move_gain,
                )
            )
        return news

    @property
    def _may_move(self) -> bool:
        free = self._rival is None and self.moves < self._limits.max_moves
        if not free or self._progress.has_unwanted or not self._pauses.over(_now()):
            return False
        # A rival may take over from one loss too many, but from one only.
        return self._losses.in_a_row(self.output_tokens) <= self._limits.max_failovers

    async def _rival_brought(self, deltas: Sequence[TokenDelta] | None) -> list[TokenDelta]:
        if deltas is None or self._progress.has_unwanted:
            await self._give_rival_up()
            return []
        news = [delta for delta in deltas if delta.wait_s is None]
        if not news or self._rival is None:
            return []
        logger.info("request %s moves: it waited for KV", self._request.request_id)
        self.moves += 1
        self._progress.move(0.0 if self._waits_since is None else _now() - self._waits_since)
        left, self._main, self._rival = self._main, self._rival, None
        await left.close()
        return await self._main_brought(news)

    async def _give_rival_up(self) -> None:
        """Nobody would be quicker, or it came to nothing."""
        self._pauses.begin(_now())
        await self._drop_rival()

    async def _drop_rival(self) -> None:
        rival, self._rival = self._rival, None
        if rival is not None:
            await rival.close()

    async def _lose(self, lane: Lane, lost: ReplicaLost) -> list[TokenDelta]:
        self._losses.note(lost.replica)
        if lane is not self._main:
            await self._give_rival_up()
            return []
        heir = self._heir  # before what nobody wants has ended
        last = self._progress.fail_over()
        if not self._progress.finished:
            await self._go_on(lost, heir)
        return last

    async def _go_on(self, lost: ReplicaLost, heir: Lane | None) -> None:
        losses = self._losses.in_a_row(self.output_tokens)
        if heir is None and losses >= self._limits.max_failovers:
            raise BackendError(
                f"{losses + 1} replicas failed this request, the last one with: {lost}"
            ) from lost
        logger.warning("request %s goes on elsewhere: %s", self._request.request_id, lost)
        self.failovers += 1
        self._losses.count(self.output_tokens)
        await self._main.close()
        if heir is None:
            await self._drop_rival()
            heir = self._begin(Conditions(self._losses.replicas, self._limits.patience_s))
        self._main, self._rival = heir, None

    @property
    def _heir(self) -> Lane | None:
        """The rival, if it can take over at once. One that nobody has accepted yet may still be
        declined; and to one that began with a choice which nobody wants now, that choice is open.
        """
        rival = self._rival
        if rival is None or rival.attempt.replica is None or self._progress.has_unwanted:
            return None
        return rival


def _now() -> float:
    return asyncio.get_running_loop().time()
