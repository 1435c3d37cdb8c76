"""Frames survive the trip; what is no frame of ours is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas import wire
from replicas.protocol import FinishReason, Receipt, TokenDelta, TokenLogprobs

numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**31)
logprobs = st.builds(
    TokenLogprobs,
    logprob=numbers,
    rank=counts,
    top=st.lists(st.tuples(counts, numbers), max_size=3).map(tuple),
)
deltas = st.builds(
    TokenDelta,
    request_id=st.text(),
    choice=counts,
    token_ids=st.lists(counts, max_size=4).map(tuple),
    logprobs=st.lists(logprobs, max_size=2).map(tuple),
    prompt_logprobs=st.none() | st.lists(logprobs, max_size=2).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_token_id=st.none() | counts,
    receipt=st.none()
    | st.builds(
        Receipt,
        *[counts] * 6,
        numbers,
        numbers,
        failovers=counts,
        placements=st.lists(st.text(), max_size=2).map(tuple),
    ),
    wait_s=st.none() | numbers,
    error=st.none() | st.text(),
    replica_failed=st.booleans(),
)


def read(data: bytes, limit: int = wire.MAX_FRAME_BYTES) -> list[object] | None:
    async def run() -> list[object] | None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await wire.read_frame(reader, limit)

    return asyncio.run(run())


@given(st.lists(deltas, max_size=3))
def test_deltas_survive_the_trip(items: list[TokenDelta]) -> None:
    frame = read(wire.deltas(items))
    assert frame is not None
    assert frame[0] == wire.DELTAS
    assert wire.unpack_deltas(frame[1]) == items  # type: ignore[arg-type]


def test_every_field_of_a_receipt_arrives_in_its_own_place() -> None:
    fields = dataclasses.fields(Receipt)
    receipt = Receipt(*range(1, 1 + len(fields)))
    frame = read(wire.deltas([TokenDelta("r", 0, (), receipt=receipt)]))
    assert frame is not None
    (delta,) = wire.unpack_deltas(frame[1])  # type: ignore[arg-type]
    assert delta.receipt == receipt


def test_the_end_of_the_stream_is_no_error() -> None:
    assert read(b"") is None
    assert read(wire.hello("token")[:-1]) is None


@pytest.mark.parametrize(
    "body",
    [b"\xc1", msgpack.packb({}), msgpack.packb([]), msgpack.packb([1, 2])],
    ids=["not msgpack", "a map", "empty", "no kind"],
)
def test_junk_is_refused(body: bytes) -> None:
    with pytest.raises(wire.FrameError):
        read(struct.pack(">I", len(body)) + body)


def test_a_frame_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(wire.FrameError, match="exceeds 10"):
        read(struct.pack(">I", 11), limit=10)
