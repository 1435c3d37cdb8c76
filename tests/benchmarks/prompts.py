"""English prompts of given lengths, the same on every run of one Python version."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer

from tests.benchmarks.workload import Workload

_LONGEST = 2048
"""Tokens of a piece at the most."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The same prompt for those who take text and for those who take token ids."""

    text: str
    token_ids: tuple[int, ...]


class PromptSource:
    """Cuts prompts out of Python's language reference, which comes with the interpreter.

    No two pieces begin at the same place, so prompts find nothing of one another in a
    prefix cache unless they are meant to.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        words = re.sub(r"\s+", " ", " ".join(topics[name] for name in sorted(topics)))
        self._token_ids = self._encode(words)
        self._starts = list(range(len(self._token_ids) - _LONGEST))
        random.Random(seed).shuffle(self._starts)

    def take(self, workload: Workload) -> tuple[Prompt, ...]:
        """Prompts for one run of a workload; lengths may be a token or two off."""
        head = f"{self._piece(workload.prefix_tokens)}\n\n" if workload.prefix_tokens else ""
        texts = [head + self._piece(workload.own_tokens) for _ in range(workload.requests)]
        return tuple(Prompt(text, tuple(self._encode(text))) for text in texts)

    def _piece(self, num_tokens: int) -> str:
        start = self._starts.pop()
        text: str = self._tokenizer.decode(self._token_ids[start : start + num_tokens])
        return text

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids
