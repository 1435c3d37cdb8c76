"""Reads the traces of Azure's LLM inference service: times and lengths, nothing of sharing.

Columns TIMESTAMP, ContextTokens and GeneratedTokens. Published with "Splitwise: Efficient
Generative LLM Inference Using Phase Splitting" (ISCA 2024).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from router.simulator.trace import BlockIds, Trace, TraceError, TraceRequest

BLOCK_SIZE = 64
"""The trace knows no blocks: these are the engine's default."""

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: Path, lines: Iterable[str], block_size: int = BLOCK_SIZE) -> Trace:
    """The trace in `lines`, sorted by time; every prompt is all its own. `path` is named in
    errors.

    Raises:
        TraceError: a column is missing, or a line's values cannot be.
    """
    reader = csv.DictReader(lines)
    missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(path, 1, f"lacks {', '.join(missing)}; expected: {','.join(_COLUMNS)}")
    ids = BlockIds()
    rows = []
    for row in reader:
        length = _integer(path, reader.line_num, row, "ContextTokens", 1)
        outputs = _integer(path, reader.line_num, row, "GeneratedTokens", 0)
        at = _time(path, reader.line_num, row["TIMESTAMP"])
        blocks = tuple(ids.fresh() for _ in range(-(-length // block_size)))
        rows.append((at, length, max(1, outputs), blocks))
    rows.sort(key=lambda row: row[0])
    start = rows[0][0] if rows else 0.0
    requests = (TraceRequest(at - start, length, n, blocks) for at, length, n, blocks in rows)
    return Trace(tuple(requests), block_size)


def _integer(path: Path, line: int, row: dict[str, str], column: str, least: int) -> int:
    text = row[column] or ""
    if not text.isdecimal() or int(text) < least:
        allowed = f"an integer from {least} upwards"
        raise TraceError(path, line, f"{column}: {text!r} is refused; allowed: {allowed}")
    return int(text)


def _time(path: Path, line: int, text: str | None) -> float:
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError as error:
        allowed = "a time like 2023-11-16 18:17:03.97"
        problem = f"TIMESTAMP: {text!r} is refused; allowed: {allowed}"
        raise TraceError(path, line, problem) from error
