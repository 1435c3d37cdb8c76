"""Frames between a replica and an ingress: length-prefixed msgpack, no pickle.

A frame is a 4-byte big-endian length and a msgpack list whose first item is its kind. One
`deltas` frame carries all that an engine step means to one ingress.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import struct
from collections.abc import Sequence
from typing import Any

import msgpack

from replicas.protocol import FinishReason, Receipt, TokenDelta, TokenLogprobs

MAX_FRAME_BYTES = 64 * 2**20
MAX_HELLO_BYTES = 1024
"""Nobody who has not shown the token gets more memory than this."""
HELLO_TIMEOUT_S = 5.0
"""Nor more time."""

_LENGTH = struct.Struct(">I")

HELLO = "hello"
ACCEPTED = "accepted"
DELTAS = "deltas"
ABORT = "abort"


class FrameError(ValueError):
    """The peer sent something that is no frame of ours."""


def hello(token: str, name: str = "") -> bytes:
    """Whoever connects, first: that it may, and who it is."""
    return pack([HELLO, token, name])


def accepted(request_id: str, placement: str | None) -> bytes:
    """Replica to ingress: the request is its to serve; and why, where that was asked for."""
    return pack([ACCEPTED, request_id, placement])


def abort(request_id: str, choice: int | None) -> bytes:
    """Ingress to replica: end a request (choice None), or one of its choices."""
    return pack([ABORT, request_id, choice])


def deltas(items: Sequence[TokenDelta]) -> bytes:
    """Replica to ingress: what one step brought."""
    return pack([DELTAS, [_pack_delta(item) for item in items]])


async def read_frame(
    reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES
) -> list[Any] | None:
    """The next frame's list; None at the end of the stream.

    Raises:
        FrameError: over `limit` bytes, or not a list that begins with a kind.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > limit:
            raise FrameError(f"a frame of {length} bytes exceeds {limit}")
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    try:
        frame = msgpack.unpackb(body, use_list=False)
    except ValueError as error:
        raise FrameError(f"not msgpack: {error}") from error
    if not isinstance(frame, tuple) or not frame or not isinstance(frame[0], str):
        raise FrameError("a frame must be a list that begins with its kind")
    return list(frame)


async def admit(reader: asyncio.StreamReader, token: str) -> str | None:
    """The name of a peer that says hello with `token` in time; None for any other.

    Raises:
        FrameError: the peer sent something else.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            content = await read_frame(reader, MAX_HELLO_BYTES)
    except TimeoutError:
        return None
    if content is None or len(content) != 3 or content[0] != HELLO:
        return None
    _, shown, name = map(str, content)
    return name if hmac.compare_digest(shown.encode(), token.encode()) else None


def unpack_deltas(items: Sequence[Sequence[Any]]) -> list[TokenDelta]:
    """The deltas of a DELTAS frame."""
    return [_unpack_delta(item) for item in items]


def pack(content: list[Any]) -> bytes:
    """A list that begins with its kind, as it goes over the wire."""
    body = msgpack.packb(content)
    return _LENGTH.pack(len(body)) + body


def _pack_delta(delta: TokenDelta) -> tuple[Any, ...]:
    receipt = delta.receipt
    return (
        delta.request_id,
        delta.choice,
        delta.token_ids,
        [_pack_logprobs(item) for item in delta.logprobs],
        None
        if delta.prompt_logprobs is None
        else [_pack_logprobs(item) for item in delta.prompt_logprobs],
        delta.finish_reason,
        delta.stop_token_id,
        None if receipt is None else dataclasses.astuple(receipt),
        delta.error,
        delta.replica_failed,
        delta.wait_s,
    )


def _unpack_delta(item: Sequence[Any]) -> TokenDelta:
    request_id, choice, token_ids, logprobs, prompt, finish, stop, receipt, *rest = item
    error, failed, wait = rest
    return TokenDelta(
        request_id=request_id,
        choice=choice,
        token_ids=token_ids,
        logprobs=tuple(TokenLogprobs(*entry) for entry in logprobs),
        prompt_logprobs=None if prompt is None else tuple(TokenLogprobs(*e) for e in prompt),
        finish_reason=None if finish is None else FinishReason(finish),
        stop_token_id=stop,
        receipt=None if receipt is None else Receipt(*receipt),
        error=error,
        replica_failed=failed,
        wait_s=wait,
    )


def _pack_logprobs(entry: TokenLogprobs) -> tuple[Any, ...]:
    return entry.logprob, entry.rank, entry.top
