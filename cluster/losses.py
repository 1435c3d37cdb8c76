"""The replicas that were lost under one request."""

from __future__ import annotations

PROGRESS_TOKENS = 64
"""With as many tokens a choice since the last loss, earlier losses count no more: a stream of an
hour may see many replicas go as planned. A request that itself kills whoever serves it, at once or
after few tokens, does not get that far."""


class Losses:
    """Counts those that come in a row; tokens are those of all choices so far."""

    def __init__(self, choices: int) -> None:
        self.replicas: frozenset[str] = frozenset()
        """As far as their names are known."""
        self._enough = PROGRESS_TOKENS * choices
        self._count = 0
        self._tokens = 0

    def in_a_row(self, tokens: int) -> int:
        """Losses between which the request did not come on enough."""
        return self._count if tokens - self._tokens < self._enough else 0

    def count(self, tokens: int) -> None:
        """The replica that served the request was lost."""
        self._count, self._tokens = self.in_a_row(tokens) + 1, tokens

    def note(self, replica: str | None) -> None:
        """`replica` was lost, whether it served the request or was only asked to."""
        if replica is not None:
            self.replicas |= {replica}
