"""What is asked of every system: how many requests, how long, how many at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in a closed loop: each user sends the next one when the last has ended."""

    name: str
    requests: int
    users: int
    """Requests under way at once."""
    prefix_tokens: int
    """Tokens that all prompts begin with; 0 where no two prompts share any."""
    own_tokens: int
    """Tokens of a prompt that are its own."""
    new_tokens: int

    @property
    def title(self) -> str:
        """One line for the table."""
        prompt = f"{self.own_tokens}"
        if self.prefix_tokens:
            prompt = f"{self.prefix_tokens} shared + {prompt}"
        how = "at once" if self.users == self.requests else f"{self.users} users"
        how = "one stream" if self.requests == 1 else f"{self.requests} requests, {how}"
        return f"{self.name}: {how}, {prompt} tokens, {self.new_tokens} new"


STANDARD = (
    Workload("batch", 64, 64, prefix_tokens=0, own_tokens=200, new_tokens=64),
    Workload("single", 1, 1, prefix_tokens=0, own_tokens=200, new_tokens=128),
    Workload("shared", 64, 16, prefix_tokens=512, own_tokens=64, new_tokens=64),
)
QUICK = (
    Workload("batch", 4, 4, prefix_tokens=0, own_tokens=24, new_tokens=4),
    Workload("single", 1, 1, prefix_tokens=0, own_tokens=24, new_tokens=4),
    Workload("shared", 4, 2, prefix_tokens=64, own_tokens=16, new_tokens=4),
)
"""To see whether the benchmark works; its figures mean nothing."""

WARM_UP = Workload("warm-up", 4, 4, prefix_tokens=0, own_tokens=40, new_tokens=8)
QUICK_WARM_UP = Workload("warm-up", 1, 1, prefix_tokens=0, own_tokens=8, new_tokens=2)
