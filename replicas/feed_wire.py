"""The frames of a replica's feed: a greeting, a snapshot, then one a step.

Digests of one kind travel as one string of bytes; loads as numbers in the order of
`ReplicaSnapshot`'s fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from replicas import wire
from replicas.core.block_hash import DIGEST_BYTES
from replicas.protocol import (
    BlockEvents,
    EngineInfo,
    FeedGreeting,
    FeedSnapshot,
    FeedStep,
    ReplicaSnapshot,
)

METADATA_KEY = "feed"
"""Of the FeedAddress, as a dict, in what Serve tells of a replica."""

_GREETING = "greeting"
_SNAPSHOT = "snapshot"
_STEP = "step"

_engine_values: Callable[[EngineInfo], tuple[Any, ...]] = attrgetter(
    *(field.name for field in fields(EngineInfo))
)
_load_values: Callable[[ReplicaSnapshot], tuple[float, ...]] = attrgetter(
    *(field.name for field in fields(ReplicaSnapshot))
)


def greeting(value: FeedGreeting) -> bytes:
    """First: who publishes."""
    engine = _engine_values(value.engine)
    return wire.pack([_GREETING, value.replica_id, value.incarnation, value.node_id, engine])


def snapshot(value: FeedSnapshot) -> bytes:
    """Second: all that can be found."""
    device, host = b"".join(value.device), b"".join(value.host)
    return wire.pack([_SNAPSHOT, value.sequence, device, host, _load_values(value.load)])


def step(value: FeedStep) -> bytes:
    """Then, again and again: what changed."""
    events = value.events
    kinds = (events.stored, events.restored, events.removed, events.offloaded, events.dropped)
    digests = [b"".join(kind) for kind in kinds]
    return wire.pack([_STEP, value.sequence, digests, events.cleared, _load_values(value.load)])


def unpack(frame: Sequence[Any]) -> FeedGreeting | FeedSnapshot | FeedStep:
    """What a frame says.

    Raises:
        FrameError: it is none of the above, or damaged.
    """
    kind, *content = frame
    try:
        return _UNPACKERS[kind](*content)
    except KeyError:
        raise wire.FrameError(f"a feed has no frames of kind {kind!r}") from None
    except (TypeError, ValueError) as error:
        raise wire.FrameError(f"a damaged frame of kind {kind!r}: {error}") from error


def _unpack_greeting(
    replica_id: str, incarnation: str, node_id: str, engine: Sequence[Any]
) -> FeedGreeting:
    return FeedGreeting(replica_id, incarnation, node_id, EngineInfo(*engine))


def _unpack_snapshot(
    sequence: int, device: bytes, host: bytes, load: Sequence[float]
) -> FeedSnapshot:
    return FeedSnapshot(_number(sequence), _split(device), _split(host), _unpack_load(load))


def _unpack_step(
    sequence: int, digests: Sequence[bytes], cleared: bool, load: Sequence[float]
) -> FeedStep:
    stored, restored, removed, offloaded, dropped = map(_split, digests)
    events = BlockEvents(stored, restored, removed, offloaded, dropped, bool(cleared))
    return FeedStep(_number(sequence), events, _unpack_load(load))


_UNPACKERS: dict[str, Callable[..., FeedGreeting | FeedSnapshot | FeedStep]] = {
    _GREETING: _unpack_greeting,
    _SNAPSHOT: _unpack_snapshot,
    _STEP: _unpack_step,
}


def _unpack_load(values: Sequence[float]) -> ReplicaSnapshot:
    return ReplicaSnapshot(*map(_number, values))


def _number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value


def _split(joined: bytes) -> tuple[bytes, ...]:
    if not isinstance(joined, bytes) or len(joined) % DIGEST_BYTES:
        raise ValueError("digests are cut off")
    return tuple(joined[i : i + DIGEST_BYTES] for i in range(0, len(joined), DIGEST_BYTES))
