"""Records what clients ask for, without what they say: a trace that `quire simulate` replays."""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from replicas.protocol import GenerateRequest
from router.simulator.mooncake import BLOCK_SIZE

logger = logging.getLogger(__name__)

MAX_NAMES = 262_144
"""Blocks that are recognised: those of 134 million tokens, about 50 MB of memory."""

MAX_QUEUED = 1024
"""Requests that wait to be written; what comes beyond them is left out, and counted."""

_BATCH_BYTES = 65_536
_BATCH_S = 1.0
"""Lines are written once there are so many of them, or the first has waited for so long: whole
ones in one call, so that whoever reads the file, or finds it after a crash, finds whole lines."""


class BlockNames:
    """Small numbers for prompt blocks: equal ones for equal tokens after an equal prefix.

    Digests are keyed by a secret that is drawn at random and never leaves the process, so a
    trace cannot be compared with a guessed text. Memory is bounded: the block not seen for the
    longest is forgotten, and gets a new number should it come again.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._key = secrets.token_bytes(32)
        self._max_names = max_names
        self._names: OrderedDict[bytes, int] = OrderedDict()
        self._next = 0

    def of(self, token_ids: Sequence[int], cache_salt: str = "") -> list[int]:
        """One number for each `BLOCK_SIZE` tokens begun."""
        digest, names = self._digest(cache_salt.encode()), []
        tokens = array("I", token_ids)
        for start in range(0, len(tokens), BLOCK_SIZE):
            digest = self._digest(digest + tokens[start : start + BLOCK_SIZE].tobytes())
            names.append(self._name(digest))
        return names

    def _digest(self, content: bytes) -> bytes:
        return blake2b(content, digest_size=16, key=self._key).digest()

    def _name(self, digest: bytes) -> int:
        name = self._names.get(digest)
        if name is not None:
            self._names.move_to_end(digest)
            return name
        name = self._names[digest] = self._next
        self._next += 1
        if len(self._names) > self._max_names:
            self._names.popitem(last=False)
        return name


@dataclass(frozen=True, slots=True)
class _Note:
    arrived_s: float
    prompt_token_ids: Sequence[int]
    cache_salt: str
    output_tokens: int


class TraceRecorder:
    """Writes one line a request in Mooncake's format to a file of its own.

    A line holds the arrival in milliseconds since the recorder was made, the lengths and the
    prompt's block numbers, and nothing else. Lines come in the order in which requests end.
    Hashing and writing happen on a thread; serving never waits for them. Once `max_mib` are
    written, the disk is full or the file cannot be written, recording is over.
    """

    def __init__(self, folder: Path, max_mib: float, started_at: float) -> None:
        """Create a file in `folder`, a new one each time: block numbers mean nothing in another.

        Args:
            folder: made where it is not there.
            max_mib: MiB that the file may have.
            started_at: now, in seconds of the clock that `note` is told.

        Raises:
            OSError: the folder or the file cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.path = folder / f"trace-{stamp}-{secrets.token_hex(4)}.jsonl"
        self.num_dropped = 0
        """Requests left out because too many waited to be written."""
        self._started_at = started_at
        self._left = int(max_mib * 2**20)
        self._names = BlockNames()
        self._queue: queue.Queue[_Note | None] = queue.Queue(MAX_QUEUED)
        file = self.path.open("xb", buffering=0)
        self._thread = threading.Thread(
            target=self._write_all, args=(file,), name="quire-recording", daemon=True
        )
        self._thread.start()

    def note(self, request: GenerateRequest, output_tokens: int, arrived_at: float) -> None:
        """A request that arrived at `arrived_at` (seconds) has ended with `output_tokens` in all
        its choices. Returns at once; does nothing once recording is over."""
        if not self._thread.is_alive():
            return
        arrived_s = max(0.0, arrived_at - self._started_at)
        note = _Note(arrived_s, request.prompt_token_ids, request.cache_salt, output_tokens)
        try:
            self._queue.put_nowait(note)
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what was noted and close the file. Blocks until then, but not longer than
        `timeout_s`: call it off the event loop. Idempotent."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=timeout_s)
            except queue.Full:
                logger.warning("%s: not all could be written in time", self.path)
            self._thread.join(timeout_s)
        if self.num_dropped:
            logger.warning("%s lacks %d requests: too many at once", self.path, self.num_dropped)
            self.num_dropped = 0

    def _write_all(self, file: BinaryIO) -> None:
        try:
            with file:
                while self._write_batch(file):
                    pass
        except OSError as error:
            logger.warning("recording is over: %s: %s", self.path, error)

    def _write_batch(self, file: BinaryIO) -> bool:
        """Wait for a request, and write what comes within a while; False once all is over."""
        batch, deadline = bytearray(), None
        while len(batch) < _BATCH_BYTES:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                note = self._queue.get(timeout=timeout)
            except queue.Empty:
                break
            line = None if note is None else self._line(note)
            if line is None or len(line) > self._left:
                file.write(batch)
                if line is not None:
                    logger.info("recording is over: %s has the size it may have", self.path)
                return False
            self._left -= len(line)
            batch += line
            deadline = deadline or time.monotonic() + _BATCH_S
        file.write(batch)
        return True

    def _line(self, note: _Note) -> bytes:
        row = {
            "timestamp": round(note.arrived_s * 1000.0),
            "input_length": len(note.prompt_token_ids),
            "output_length": note.output_tokens,
            "hash_ids": self._names.of(note.prompt_token_ids, note.cache_salt),
        }
        return json.dumps(row).encode() + b"\n"
