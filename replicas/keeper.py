"""One actor a node that owns the slabs, so that blocks outlive the replica that wrote them."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorProxy
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from replicas.slab import Memory

NAMESPACE = "quire"
GRACE_S = 60.0
"""How long a dead replica's slab waits for the one that takes its place."""
HEADROOM = 0.1
"""Of the node's object store, left to everybody else: a full store spills to disk unasked."""

_SWEEPS_A_GRACE = 6
_START_TIME_FIELD = 19
"""Of /proc/<pid>/stat, counted from the state, the first after the command's name."""

Grant = tuple[int, list[ObjectRef[Memory]]]
"""A slab's number and its memory. In a list, as Ray would resolve a bare reference."""


class NoRoomError(RuntimeError):
    """The node's object store has too little memory left for the slab that was asked for."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from a later one that was given its pid."""

    pid: int
    start_time: int
    """Clock ticks after the machine's start."""

    @classmethod
    def current(cls) -> Owner:
        pid = os.getpid()
        return cls(pid, int(_stat(pid)[_START_TIME_FIELD]))

    def is_alive(self) -> bool:
        try:
            stat = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        except OSError:  # not known to be dead: two must never write one slab
            return True
        return stat[0] not in "ZX" and int(stat[_START_TIME_FIELD]) == self.start_time


@dataclass(slots=True)
class _Kept:
    """A slab in this keeper's care."""

    identity: bytes
    size: int
    ref: ObjectRef[Memory]
    pin: Memory
    """Ray spills no object that somebody has mapped."""
    owner: Owner | None
    owned_at: float
    """When its owner was last known to live."""

    def is_owned(self) -> bool:
        return self.owner is not None and self.owner.is_alive()


class Keeper:
    """Grants slabs out of `capacity_bytes` of object store.

    A slab whose owner has died is given, as it is, to the next that asks for one of its identity
    and size; after `grace_s` without an owner it is freed. The keeper ends when nobody has owned
    anything for that long.
    """

    def __init__(self, capacity_bytes: int, grace_s: float) -> None:
        self._capacity = capacity_bytes
        self._grace_s = grace_s
        self._sweep_s = grace_s / _SWEEPS_A_GRACE
        self._slabs: dict[int, _Kept] = {}
        self._promised = 0
        """Bytes of slabs that are being made."""
        self._numbers = itertools.count(1)
        self._owned_at = time.monotonic()
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    @ray.method
    async def attach(self, owner: Owner, identity: bytes, size: int) -> Grant:
        """A slab for `owner`, which must live on this node; raises NoRoomError."""
        self._owned_at = now = time.monotonic()
        number = self._orphan(identity, size)
        if number is not None:
            kept = self._slabs[number]
            kept.owner, kept.owned_at = owner, now
            return number, [kept.ref]
        self._make_room(size)
        self._promised += size
        try:
            ref, pin = await self._allocate(size)
        finally:
            self._promised -= size
        number = next(self._numbers)
        self._slabs[number] = _Kept(identity, size, ref, pin, owner, time.monotonic())
        return number, [ref]

    @ray.method
    async def slabs(self, identity: bytes) -> list[Grant]:
        """All slabs of that identity, their owners dead or alive."""
        return [(n, [kept.ref]) for n, kept in self._slabs.items() if kept.identity == identity]

    @ray.method
    async def detach(self, number: int, owner: Owner) -> None:
        """`owner` needs the slab no more; somebody else may take it over, or has already: this
        may come after its sender's death."""
        kept = self._slabs.get(number)
        if kept is not None and kept.owner == owner:
            kept.owner = None
            kept.owned_at = self._owned_at = time.monotonic()

    def _orphan(self, identity: bytes, size: int) -> int | None:
        """The one that was owned last, as its blocks are the likeliest to be asked for."""
        orphans = [
            (kept.owned_at, number)
            for number, kept in self._slabs.items()
            if (kept.identity, kept.size) == (identity, size) and not kept.is_owned()
        ]
        return max(orphans)[1] if orphans else None

    def _make_room(self, size: int) -> None:
        """Free slabs of the dead, those longest dead first, if it takes that to fit the slab."""
        owned = {number: kept.is_owned() for number, kept in self._slabs.items()}
        taken = self._promised + sum(kept.size for kept in self._slabs.values())
        left = int(self._capacity * (1 - HEADROOM)) - taken
        orphans = sorted((n for n in owned if not owned[n]), key=lambda n: self._slabs[n].owned_at)
        obtainable = left + sum(self._slabs[n].size for n in orphans)
        if size > obtainable:
            raise NoRoomError(
                f"a slab of {size:,} bytes does not fit: {obtainable:,} of the node's "
                f"{self._capacity:,} bytes of object store are left for slabs"
            )
        for number in orphans:
            if size <= left:
                return
            left += self._slabs.pop(number).size

    async def _allocate(self, size: int) -> tuple[ObjectRef[Memory], Memory]:
        """Zeros in the object store, mapped. Where it is full, as while neighbours hold on to what
        has just been freed, Ray gives a file on disk and does not say so: that is given back and,
        after a second try, refused."""
        for wait_s in (0.0, self._sweep_s):
            await asyncio.sleep(wait_s)
            # Zeros are mapped lazily: the only memory that this fills is the object's.
            ref = ray.put(np.zeros(size, dtype=np.uint8))
            pin = await ref
            # The store is one mapping, and such a file another, as large as the object.
            if _mapping_bytes(pin) > self._capacity * (1 - HEADROOM / 2):
                return ref, pin
            del ref, pin
        raise NoRoomError(
            f"a slab of {size:,} bytes does not fit: others use more than "
            f"{HEADROOM:.0%} of the node's {self._capacity:,} bytes of object store"
        )

    async def _sweep(self) -> None:
        while time.monotonic() - self._owned_at <= self._grace_s:
            await asyncio.sleep(self._sweep_s)
            self._free_abandoned()
        ray.kill(ray.get_runtime_context().current_actor)

    def _free_abandoned(self) -> None:
        now = time.monotonic()
        for number, kept in list(self._slabs.items()):
            if kept.is_owned():
                self._owned_at = kept.owned_at = now
            elif now - kept.owned_at > self._grace_s:
                del self._slabs[number]


def of_this_node(grace_s: float = GRACE_S) -> ActorProxy[Keeper]:
    """The node's keeper, started where there is none. `grace_s` counts for a new one only."""
    node = ray.get_runtime_context().get_node_id()
    actor = ray.remote(Keeper).options(
        name=f"quire-keeper-{node}",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    return actor.remote(_object_store_bytes(node), grace_s)


def _mapping_bytes(memory: Memory) -> int:
    """Size of the mapping that the memory lies in."""
    address = memory.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= address < end:
            return end - start
    return 0


def _object_store_bytes(node: str) -> int:
    resources = next(each["Resources"] for each in ray.nodes() if each["NodeID"] == node)
    return int(resources["object_store_memory"])


def _stat(pid: int) -> list[str]:
    """The fields from the state on; the command's name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
