"""The replica on which a request costs least, its cached prefix counted."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from router.policies.cost import CostRule
from router.policies.policy import Candidate, Demand, Ranking, Terms
from router.policies.ties import by_rendezvous

TIE = 0.02
"""Costs within this share of the least are equal: measured rates are no better than that, and an
idle cluster would send everything to the replica that measured itself fastest."""


class PrefixAware:
    """Minimises the cost rule; near equals are told apart by rendezvous hash.

    A replica without anything of the prompt has all of it to compute: being empty is no merit.
    """

    name = "prefix_aware"
    knows_load = True
    knows_prefixes = True

    def __init__(self, rule: CostRule | None = None) -> None:
        self._rule = rule or CostRule()

    def rank(self, demand: Demand, candidates: Sequence[Candidate]) -> Ranking:
        terms = tuple([self._rule.terms(demand, candidate) for candidate in candidates])
        ordered = sorted(terms, key=attrgetter("cost_s"))
        limit = ordered[0].cost_s * (1 + TIE)
        equals = [each.replica for each in ordered if each.cost_s <= limit]
        best = by_rendezvous(demand.key, equals) if len(equals) > 1 else equals
        ranked = (*best, *[each.replica for each in ordered[len(equals) :]])
        return Ranking(ranked, _reason(terms, best), terms)


def _reason(terms: Sequence[Terms], best: Sequence[str]) -> str:
    chosen = next(each for each in terms if each.replica == best[0])
    rank = f"least cost: {chosen.cost_s:.3f} s"
    if len(best) > 1:
        rank = f"one of {len(best)} within {TIE:.0%} of the least cost: {chosen.cost_s:.3f} s"
    return f"{rank}, {chosen.device_tokens} tokens on the device, {chosen.host_tokens} on the host"
