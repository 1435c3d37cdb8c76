"""Reads traces in Mooncake's format: a JSON object a line, prompts as ids of their blocks.

`timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one for each
`BLOCK_SIZE` tokens of the prompt begun. Published with "Mooncake: A KVCache-centric
Disaggregated Architecture for LLM Serving" (FAST 2025); `quire` records in it too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from router.simulator.trace import BlockIds, Trace, TraceError, TraceRequest

BLOCK_SIZE = 512
"""Tokens a hash id stands for in the published traces and in Quire's recordings."""


def read(path: Path, lines: Iterable[str], block_size: int = BLOCK_SIZE) -> Trace:
    """The trace in `lines`, sorted by time; `path` is named in errors.

    Raises:
        TraceError: a line is no such object, or its numbers cannot be.
    """
    ids = BlockIds()
    requests = [
        _Line(path, number).request(line, ids, block_size)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    requests.sort(key=lambda request: request.arrived_s)
    return Trace(tuple(requests), block_size)


class _Line:
    """One line of the file, which errors name."""

    def __init__(self, path: Path, number: int) -> None:
        self._path = path
        self._number = number

    def request(self, text: str, ids: BlockIds, block_size: int) -> TraceRequest:
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise self._error(f"is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise self._error("is no JSON object")
        length = self._integer(row, "input_length", 1)
        return TraceRequest(
            arrived_s=self._milliseconds(row) / 1000.0,
            num_prompt_tokens=length,
            num_output_tokens=max(1, self._integer(row, "output_length", 0)),
            blocks=tuple(map(ids.named, self._hash_ids(row, length, block_size))),
        )

    def _milliseconds(self, row: dict[str, Any]) -> float:
        value = row.get("timestamp")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
            raise self._refused("timestamp", value, "milliseconds from 0 upwards")
        return float(value)

    def _integer(self, row: dict[str, Any], key: str, least: int) -> int:
        value = row.get(key)
        if type(value) is not int or value < least:
            raise self._refused(key, value, f"an integer from {least} upwards")
        return value

    def _hash_ids(self, row: dict[str, Any], length: int, block_size: int) -> list[int]:
        value = row.get("hash_ids")
        if not isinstance(value, list) or any(type(each) is not int for each in value):
            raise self._refused("hash_ids", value, "a list of integers")
        expected = -(-length // block_size)
        if len(value) != expected:
            raise self._error(
                f"hash_ids: {len(value)} ids for input_length {length} are refused; allowed: "
                f"{expected}, one for each {block_size} tokens begun (see --block-size)"
            )
        return value

    def _refused(self, key: str, value: object, allowed: str) -> TraceError:
        shown = "nothing" if value is None else repr(value)[:80]
        return self._error(f"{key}: {shown} is refused; allowed: {allowed}")

    def _error(self, problem: str) -> TraceError:
        return TraceError(self._path, self._number, problem)
