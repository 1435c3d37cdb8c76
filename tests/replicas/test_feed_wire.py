"""What a feed says survives the trip; what is damaged is refused."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas import feed_wire, wire
from replicas.protocol import (
    BlockEvents,
    EngineInfo,
    FeedGreeting,
    FeedSnapshot,
    FeedStep,
    ReplicaSnapshot,
)

digests = st.lists(st.binary(min_size=16, max_size=16), max_size=4).map(tuple)
counts = st.integers(0, 2**40)
loads = st.builds(
    ReplicaSnapshot,
    running=counts,
    queued_tokens=counts,
    decode_step_s=st.floats(0, 1e9),
)
events = st.builds(BlockEvents, *[digests] * 5, cleared=st.booleans())
LOAD = ReplicaSnapshot(*range(1, 1 + len(dataclasses.fields(ReplicaSnapshot))))
ENGINE = EngineInfo("cpu", "float32", "bfloat16", 1, 2, 3, 4, 5, 6, "model")
VALUES = list(dataclasses.astuple(LOAD))


def read(data: bytes) -> list[Any]:
    async def run() -> list[Any] | None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await wire.read_frame(reader)

    frame = asyncio.run(run())
    assert frame is not None
    return frame


@given(st.builds(FeedStep, counts, events, loads))
def test_steps_survive_the_trip(value: FeedStep) -> None:
    assert feed_wire.unpack(read(feed_wire.step(value))) == value


@given(st.builds(FeedSnapshot, counts, digests, digests, loads))
def test_snapshots_survive_the_trip(value: FeedSnapshot) -> None:
    assert feed_wire.unpack(read(feed_wire.snapshot(value))) == value


def test_every_field_arrives_in_its_own_place() -> None:
    greeting = FeedGreeting("replica", "incarnation", "node", ENGINE)
    assert feed_wire.unpack(read(feed_wire.greeting(greeting))) == greeting
    snapshot = FeedSnapshot(7, (b"d" * 16,), (b"h" * 16,), LOAD)
    assert feed_wire.unpack(read(feed_wire.snapshot(snapshot))) == snapshot
    a, b, c, d, e = ((bytes([kind]) * 16,) for kind in range(5))
    step = FeedStep(8, BlockEvents(a, b, c, d, e, cleared=True), LOAD)
    assert feed_wire.unpack(read(feed_wire.step(step))) == step


def test_a_replica_that_knows_fewer_figures_is_understood() -> None:
    frame = ["step", 1, [b""] * 5, False, [3, 4]]
    assert feed_wire.unpack(frame) == FeedStep(1, BlockEvents(), ReplicaSnapshot(3, 4))


@pytest.mark.parametrize(
    "frame",
    [
        ["deltas", []],
        ["step"],
        ["step", 1, [b""] * 5, False, VALUES, "more"],
        ["step", 1, [b""] * 4, False, VALUES],
        ["step", 1, [b"x" * 15] + [b""] * 4, False, VALUES],
        ["step", 1, ["x" * 16] + [b""] * 4, False, VALUES],
        ["step", 1, [b""] * 5, False, [*VALUES, 1]],
        ["step", 1, [b""] * 5, False, ["one"]],
        ["step", 1, [b""] * 5, False, None],
        ["step", "1", [b""] * 5, False, VALUES],
        ["snapshot", 1, b"x" * 17, b"", VALUES],
        ["snapshot", 1, None, b"", VALUES],
        ["greeting", "replica", "incarnation", "node", []],
    ],
    ids=str,
)
def test_what_is_damaged_is_refused(frame: list[Any]) -> None:
    with pytest.raises(wire.FrameError):
        feed_wire.unpack(frame)
