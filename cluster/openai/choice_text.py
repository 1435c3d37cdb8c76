"""The text of one choice, as its tokens come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cluster.openai.detokenizer import Detokenizer
from cluster.openai.logprobs import TokenEntry
from cluster.openai.stop import StopMatcher
from replicas.protocol import TokenLogprobs


class ChoiceText:
    """Detokeniser, stop strings and log-probabilities of one choice, kept in step.

    An entry is let go only when all of its text has been, and none that begins at or after a
    stop string's cut ever is.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        *,
        include_stop: bool,
        min_tokens: int,
        offset: int,
    ) -> None:
        """`offset`: characters of an echoed prompt before the output; stop strings are not
        looked for in the text of the first `min_tokens` tokens."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include=include_stop)
        self._unmatched_tokens = min_tokens
        self._read = offset
        self._released = offset
        self._entries: deque[TokenEntry] = deque()

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.matched

    def push(self, token_id: int, logprobs: TokenLogprobs | None, *, silent: bool = False) -> str:
        """Text that may be shown now that `token_id` has come. `silent`: it adds no text."""
        piece = "" if silent else self._detokenizer.push(token_id)
        if logprobs is not None:
            self._entries.append(TokenEntry(token_id, piece, self._read, logprobs))
        self._read += len(piece)
        if self._unmatched_tokens:
            self._unmatched_tokens -= 1
            shown = piece
        else:
            shown = self._matcher.feed(piece)
        self._released += len(shown)
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the choice."""
        shown = ""
        if self.matched is None:
            piece = self._detokenizer.flush()
            if piece and self._entries:
                self._entries[-1].text += piece
            self._read += len(piece)
            shown = self._matcher.feed(piece)
            shown += self._matcher.flush()
        self._released += len(shown)
        return shown

    def take_entries(self, *, final: bool) -> list[TokenEntry]:
        """Entries whose text has been let go since the last call; the rest too at the end."""
        if not self._entries:
            return []
        taken = []
        settled = final or not self._detokenizer.pending
        while settled and self._entries:
            entry = self._entries[0]
            if not final and entry.offset + len(entry.text) > self._released:
                break
            self._entries.popleft()
            taken.append(entry)
        return taken if self.matched is None else self._clipped(taken)

    def _clipped(self, entries: list[TokenEntry]) -> list[TokenEntry]:
        kept = [entry for entry in entries if entry.offset < self._released]
        if kept:
            kept[-1].text = kept[-1].text[: self._released - kept[-1].offset]
        return kept
