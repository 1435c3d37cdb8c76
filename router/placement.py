"""Places requests: states, prefix index and load book under a policy. Pure; the clock is an
argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replicas.protocol import GenerateRequest
from router.candidates import candidates
from router.expectations import LATE_S, Expectations
from router.hot_prefixes import HotPrefixes
from router.load_book import LoadBook, Work
from router.policies.least_loaded import LeastLoaded
from router.policies.policy import Candidate, Demand, PlacementPolicy, Ranking, Terms
from router.policies.power_of_two import PowerOfTwo
from router.policies.prefix_aware import PrefixAware
from router.policies.round_robin import RoundRobin
from router.prefix_index import Hit, PrefixIndex
from router.prompt_chains import Chains, PromptChains, block_kind
from router.replica_states import ReplicaState, ReplicaStates
from router.warm_up import WarmUp

POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "prefix_aware": PrefixAware,
}

MAX_BLOCKS = 16_000_000
"""Blocks the index lists at the most: a little over 2 GB."""
EXPECTED_OUTPUT_TOKENS = 128
"""Of a choice, while nobody runs whose outputs could be learned from."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes, and why."""

    ranked: tuple[str, ...]
    """The best first."""
    policy: str
    reason: str
    stale: bool
    """Whether no replica's state was known, so that bookings alone decided."""
    terms: tuple[Terms, ...] = ()
    """One a candidate; none where the policy counts no costs."""
    declined: bool = False
    """Whether nobody is as quick as the call asks for: it goes nowhere."""
    again: bool = False
    """Whether the call was placed before and came back, as nobody had room."""

    @property
    def cost_s(self) -> float:
        """The best one's, seconds; infinite where the policy counts no costs."""
        costs = (each.cost_s for each in self.terms if each.replica == self.ranked[0])
        return next(costs, math.inf)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "chosen": self.ranked[0],
            "ranked": list(self.ranked),
            "policy": self.policy,
            "reason": self.reason,
            "stale": self.stale,
            "terms": [each._asdict() for each in self.terms],
        }


class Placer:
    """Chooses a replica for a request and books the work there, in one step without waiting."""

    def __init__(self, policy: PlacementPolicy, *, max_blocks: int = MAX_BLOCKS) -> None:
        self.states = ReplicaStates(PrefixIndex(max_blocks))
        """For the replicas' feeds to write to."""
        self.placements = 0
        self.stale_placements = 0
        """Those decided without any replica's state, though the policy goes by it."""
        self._policy = policy
        self._fallback = LeastLoaded()
        self._prompts = PromptChains()
        self._book = LoadBook()
        self._expectations = Expectations(self.states.index)
        self._hot = HotPrefixes()
        self._warm_up = WarmUp()

    def place(
        self,
        call_id: str,
        request: GenerateRequest,
        replicas: Sequence[str],
        now: float,
        within_s: float | None = None,
    ) -> Placement:
        """All `replicas` in order; work is booked on the first under `call_id`, unless `within_s`
        is given and that one costs more: then the placement is declined and leaves no trace."""
        chains = self.chains(request, replicas)
        return self.decide(call_id, request, chains, replicas, now, within_s)

    def chains(self, request: GenerateRequest, replicas: Sequence[str]) -> Chains:
        """The prompt's digests, for the replicas that have greeted; none where the policy has no
        use for them."""
        if not self._policy.knows_prefixes:
            return {}
        states = (self.states.get(replica) for replica in replicas)
        return self._prompts.of(request, (state for state in states if state is not None))

    def decide(
        self,
        call_id: str,
        request: GenerateRequest,
        chains: Chains,
        replicas: Sequence[str],
        now: float,
        within_s: float | None = None,
    ) -> Placement:
        """`place`, the digests given."""
        again = call_id in self._book
        self._forget_the_past(call_id, now)
        self._warm_up.see(replicas, now)
        states = self._fresh(replicas, now)
        hits = self._match(chains)
        deepest = _deepest(chains, states, hits)
        work = _work(request, states)
        known = candidates(replicas, states, hits, self._book, work)
        demand = Demand(
            tokens=work.prefill_tokens,
            output_tokens=work.output_tokens,
            hits_per_minute=self._hot.per_minute(deepest, now) if deepest else 0.0,
            key=next((c[-1] for c in chains.values() if c), request.request_id.encode()),
        )
        stale = self._policy.knows_load and not states
        ranking = self._hold_back(self._rank(demand, known, stale=stale), now)
        placement = Placement(
            ranking.ranked, self._policy.name, ranking.reason, stale, ranking.terms, again=again
        )
        if within_s is not None and placement.cost_s > within_s:
            return replace(placement, declined=True)
        if not again:
            self._count(placement, deepest, replicas, now)
        chosen = next(each for each in known if each.replica == ranking.ranked[0])
        self._commit(call_id, work, chosen, now)
        if chosen.fresh:
            self._expect(call_id, chosen, chains, hits, now)
        return placement

    def routed(self, call_id: str, replica: str, now: float) -> None:
        """`replica` has accepted the call."""
        self._book.routed(call_id, replica, now)
        self._expectations.move(call_id, replica, now + LATE_S)

    def completed(self, call_id: str, replica: str | None = None) -> None:
        """The call has ended, well or not, at `replica` where that is told: what it has not
        stored by now it never will."""
        if self._book.release(call_id, replica):
            self._expectations.cancel(call_id)

    def forget(self, replica: str) -> None:
        """A replica has gone: its KV on the device, and its bookings too."""
        self.states.forget(replica)
        self._book.drop(replica)
        self._warm_up.forget(replica)

    def requests(self, replica: str) -> int:
        """Requests in work on `replica`, sent by this router."""
        return self._book.requests(replica)

    def _forget_the_past(self, call_id: str, now: float) -> None:
        self._book.release(call_id)
        self._book.expire(now)
        self._expectations.cancel(call_id)
        self._expectations.expire(now)
        self.states.expire(now)

    def _fresh(self, replicas: Sequence[str], now: float) -> dict[str, ReplicaState]:
        found = {}
        for replica in replicas:
            state = self.states.get(replica)
            if state is not None and state.is_fresh(now):
                found[replica] = state
        return found

    def _match(self, chains: Chains) -> dict[str, Hit]:
        """Of chains of several kinds a replica knows one."""
        hits: dict[str, Hit] = {}
        for chain in chains.values():
            hits.update(self.states.index.match(chain))
        return hits

    def _rank(self, demand: Demand, known: Sequence[Candidate], *, stale: bool) -> Ranking:
        if not stale:
            return self._policy.rank(demand, known)
        ranking = self._fallback.rank(demand, known)
        return replace(ranking, reason=f"no replica's state is known; {ranking.reason}")

    def _hold_back(self, ranking: Ranking, now: float) -> Ranking:
        """Behind the others those that warm up and have had their share."""
        held = self._warm_up.held_back(ranking.ranked, now)
        best = ranking.ranked[0]
        if best not in held or len(held) == len(ranking.ranked):
            return ranking
        ranked = sorted(ranking.ranked, key=held.__contains__)
        reason = f"next after {best}, which warms up; {best}: {ranking.reason}"
        return Ranking(tuple(ranked), reason, ranking.terms)

    def _count(
        self, placement: Placement, deepest: bytes | None, replicas: Sequence[str], now: float
    ) -> None:
        """Once for each call, however often it comes back."""
        self.placements += 1
        self.stale_placements += placement.stale
        self._warm_up.took(placement.ranked[0], replicas)
        if deepest:
            self._hot.hit(deepest, now)

    def _commit(self, call_id: str, work: Work, chosen: Candidate, now: float) -> None:
        booked = work._replace(prefill_tokens=chosen.uncached_tokens)
        self._book.book(call_id, chosen.replica, booked, now)

    def _expect(
        self,
        call_id: str,
        chosen: Candidate,
        chains: Chains,
        hits: Mapping[str, Hit],
        now: float,
    ) -> None:
        state = self.states.get(chosen.replica)
        chain = chains.get(block_kind(state.greeting.engine), ()) if state is not None else ()
        hit = hits.get(chosen.replica, Hit())
        tokens = chosen.queued_tokens + chosen.uncached_tokens
        deadline = now + tokens / chosen.prefill_tokens_per_s + LATE_S
        self._expectations.expect(call_id, chosen.replica, chain, deadline, hit.device)


def _deepest(
    chains: Chains, states: Mapping[str, ReplicaState], hits: Mapping[str, Hit]
) -> bytes | None:
    """The last block of the prompt that anybody has with all that come before it."""
    found: tuple[int, bytes] | None = None
    for replica, hit in hits.items():
        state, depth = states.get(replica), hit.device + hit.host
        if state is not None and (found is None or depth > found[0]):
            found = depth, chains[block_kind(state.greeting.engine)][depth - 1]
    return None if found is None else found[1]


def _work(request: GenerateRequest, states: Mapping[str, ReplicaState]) -> Work:
    """The request's, if nothing of it is cached. How long outputs get is read off those that run:
    on average they are half-way."""
    running = sum(state.load.running for state in states.values())
    to_come = sum(state.load.expected_tokens for state in states.values())
    usual = 2 * to_come / running if to_come else EXPECTED_OUTPUT_TOKENS
    left = [request.sampling.max_tokens] * request.n
    known = len(request.prompt_token_ids)
    for choice, progress in enumerate(request.progress[: request.n]):
        known += len(progress.output_token_ids)
        left[choice] -= len(progress.output_token_ids)
        if progress.finished:
            left[choice] = 0
    outputs = sum(min(max(tokens, 0), usual) for tokens in left)
    return Work(known, request.n, round(outputs))
