"""What one subprocess of the benchmark is to do; travels as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from tests.benchmarks.prompts import Prompt
from tests.benchmarks.workload import Workload

Say = Callable[[str], None]
"""Takes a line about progress."""


@dataclass(frozen=True, slots=True)
class Run:
    """A workload with its prompts."""

    workload: Workload
    prompts: tuple[Prompt, ...]

    def cut(self, requests: int | None, new_tokens: int | None) -> Self:
        """The same with so many requests and new tokens at the most."""
        workload = self.workload
        count = min(workload.requests, requests or workload.requests)
        workload = replace(
            workload,
            requests=count,
            users=min(workload.users, count),
            new_tokens=min(workload.new_tokens, new_tokens or workload.new_tokens),
        )
        return replace(self, workload=workload, prompts=self.prompts[:count])

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        prompts = tuple(Prompt(p["text"], tuple(p["token_ids"])) for p in data["prompts"])
        return cls(Workload(**data["workload"]), prompts)


@dataclass(frozen=True, slots=True)
class Plan:
    """The model, the machine's share, and the runs in their order."""

    folder: Path
    dtype: str
    """`float32`, `bfloat16`, or `auto` until the machine has been asked."""
    threads: int
    quick: bool
    scratch: Path
    """A folder for whatever the subprocess has to write."""
    warm_up: Run | None = None
    runs: tuple[Run, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens the longest request reaches."""
        return max(len(p.token_ids) + r.workload.new_tokens for r in self.runs for p in r.prompts)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        data = json.loads(path.read_text(encoding="utf-8"))
        warm_up = data.pop("warm_up")
        return cls(
            folder=Path(data.pop("folder")),
            scratch=Path(data.pop("scratch")),
            warm_up=None if warm_up is None else Run.from_json(warm_up),
            runs=tuple(Run.from_json(run) for run in data.pop("runs")),
            **data,
        )
