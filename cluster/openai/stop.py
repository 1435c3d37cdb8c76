"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string, and nothing that may belong to one.

    Of several stop strings the one that is complete first counts, the longest if two end
    together; so the outcome does not depend on how the text is cut into pieces. The cost is
    linear in the text (Knuth-Morris-Pratt for each stop string).
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`stops` are not empty; with `include` the stop string itself is let through."""
        self._stops = sorted(stops, key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._first = frozenset(stop[0] for stop in stops)
        self._lengths = [0] * len(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """The text that is known to be shown now that `text` has come; nothing after a match."""
        if self.matched is not None:
            return ""
        if not any(self._lengths) and self._first.isdisjoint(text):
            return text
        for position, character in enumerate(text):
            self.matched = self._advance(character)
            if self.matched is not None:
                return self._cut(self._held + text[: position + 1], self.matched)
        return self._split(self._held + text)

    def flush(self) -> str:
        """What is still held back, as no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """The stop string that `character` completes."""
        for index, stop in enumerate(self._stops):
            length = self._lengths[index]
            borders = self._borders[index]
            while length and stop[length] != character:
                length = borders[length]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                return stop
            self._lengths[index] = length
        return None

    def _cut(self, text: str, stop: str) -> str:
        self._held = ""
        return text if self._include else text[: len(text) - len(stop)]

    def _split(self, text: str) -> str:
        keep = 0 if self._include else max(self._lengths, default=0)
        boundary = len(text) - keep
        self._held = text[boundary:]
        return text[:boundary]


def _borders(stop: str) -> list[int]:
    """For each length of a matched prefix, the length of its longest proper border."""
    borders = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[length] != stop[position]:
            length = borders[length]
        if position + 1 < len(stop):
            if stop[length] == stop[position]:
                length += 1
            borders[position + 1] = length
    return borders
