"""The systems that can be measured."""

from __future__ import annotations

import sys
from dataclasses import dataclass

_PACKAGE = "tests.benchmarks.columns"


@dataclass(frozen=True, slots=True)
class Column:
    """One system."""

    name: str
    """What --only calls it."""
    title: str
    module: str
    python: str = sys.executable
    """The interpreter it is installed for."""
    max_requests: int | None = None
    max_new_tokens: int | None = None
    """Bounds for a system so slow that the whole workload would take too long."""


OURS = (
    Column("in-process", "ours, in process", f"{_PACKAGE}.in_process"),
    Column("cluster", "ours, over HTTP", f"{_PACKAGE}.cluster"),
)
TRANSFORMERS = (
    Column("static", "transformers generate", f"{_PACKAGE}.static_generate"),
    Column(
        "generate-batch",
        "transformers generate_batch",
        f"{_PACKAGE}.generate_batch",
        max_requests=16,
        max_new_tokens=32,
    ),
)
PEERS = {"vllm": "vLLM, over HTTP", "openvino": "OpenVINO GenAI"}


def columns(peers: str) -> tuple[Column, ...]:
    """Ours, transformers', and those of `peers`: NAME or NAME=PYTHON, separated by commas.

    Raises:
        ValueError: there is no such peer.
    """
    found = [*OURS, *TRANSFORMERS]
    for peer in filter(None, (part.strip() for part in peers.split(","))):
        name, _, python = peer.partition("=")
        if name not in PEERS:
            raise ValueError(f"PEERS: {name!r} is not known; there are {', '.join(PEERS)}")
        module = f"{_PACKAGE}.{name}"
        found.append(Column(name, PEERS[name], module, python or sys.executable))
    return tuple(found)
