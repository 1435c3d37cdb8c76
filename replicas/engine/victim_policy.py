"""The victim policies by their names in the configuration."""

from __future__ import annotations

from typing import Literal

from replicas.core.preemption.cheapest import Cheapest
from replicas.core.preemption.last_admitted import LastAdmitted
from replicas.core.preemption.policy import PreemptionPolicy
from replicas.core.preemption.priority import Priority

PolicyName = Literal["last_admitted", "priority", "cheapest"]


def make(name: PolicyName) -> PreemptionPolicy:
    """The policy of that name."""
    policies: dict[PolicyName, PreemptionPolicy] = {
        "last_admitted": LastAdmitted(),
        "priority": Priority(),
        "cheapest": Cheapest(),
    }
    return policies[name]
