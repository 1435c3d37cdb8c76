"""A slab in Ray's object store: it outlives the replica, and its neighbours read it in place."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from ray.actor import ActorProxy
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from torch import Tensor

from replicas import keeper
from replicas.core.block_transfer import OWN_SLAB, Location
from replicas.host_store import HostStoreError, SlabStore
from replicas.neighbours import Neighbours
from replicas.slab import Memory, Slab, SlabError

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 120.0
"""The keeper writes a new slab once, at no more than a few GB/s."""
DISCOVERY_S = 2.0
"""Between two looks at who the neighbours are."""
_MAP_TIMEOUT_S = 1.0
_RETRY_S = (0.1, 0.3, 1.0, 3.0)
_TOUCH_BYTES = 4096


class RayStore(SlabStore):
    """A HostStore over the slab `number` of the node's keeper. Neighbours are looked for while
    blocks are; without a keeper there are none, and the own slab works on."""

    def __init__(
        self,
        slab: Slab,
        number: int,
        identity: bytes,
        node_keeper: ActorProxy[keeper.Keeper],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(slab)
        self._number = number
        self._identity = identity
        self._keeper = node_keeper
        self._clock = clock
        self._neighbours = Neighbours(clock)
        self._scratch = torch.empty(slab.block_bytes, dtype=torch.uint8)
        self._listing = node_keeper.slabs.remote(identity)
        self._look_at = clock()
        self._listens = True

    def find(self, digest: bytes) -> Location | None:
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + DISCOVERY_S
            self._discover()
        return self._neighbours.find(digest)

    def fetch(self, source: Location, digest: bytes) -> Tensor | None:
        if source[0] == OWN_SLAB:
            return super().fetch(source, digest)
        found = self._neighbours.read(source, digest, self._scratch.numpy())
        return self._scratch if found else None

    def close(self) -> None:
        self._neighbours.keep(())
        with contextlib.suppress(RayError):
            self._keeper.detach.remote(self._number, keeper.Owner.current())
        super().close()

    def _discover(self) -> None:
        """Take in the keeper's answer if it is there, and ask again; never waits for it."""
        try:
            if not _is_ready(self._listing):
                return
            self._meet(ray.get(self._listing, timeout=_MAP_TIMEOUT_S))
            self._listens = True
        except RayError as error:
            if self._listens:
                logger.warning("no host memory of neighbours: %s", error)
            self._listens = False
            self._neighbours.keep(())
        with contextlib.suppress(RayError):
            self._listing = self._keeper.slabs.remote(self._identity)

    def _meet(self, grants: list[keeper.Grant]) -> None:
        self._neighbours.keep({number for number, _ in grants})
        for number, [ref] in grants:
            if number == self._number or number in self._neighbours or not _is_ready(ref):
                continue
            try:
                memory = ray.get(ref, timeout=_MAP_TIMEOUT_S)
                self._neighbours.add(number, Slab(memory, self._identity, self.block_bytes))
            except (RayError, SlabError) as error:
                # A slab just granted has no header yet: it is met the next time.
                logger.info("slab %d of a neighbour is not readable: %s", number, error)


def attach(
    identity: bytes,
    swap_bytes: int,
    block_bytes: int,
    grace_s: float = keeper.GRACE_S,
    clock: Callable[[], float] = time.monotonic,
) -> RayStore:
    """A store of as many slots of `block_bytes` as fit in `swap_bytes` of the node's object
    store, with what a dead replica of the same `identity` (16 bytes) and size left there.

    `grace_s` is for a keeper that this starts. Raises HostStoreError.
    """
    num_slots = Slab.slots_within(swap_bytes, block_bytes)
    if not num_slots:
        raise HostStoreError(
            f"a swap space of {swap_bytes:,} bytes holds no block of {block_bytes:,} bytes"
        )
    try:
        node_keeper, (number, [ref]) = _grant(identity, Slab.size(num_slots, block_bytes), grace_s)
        memory = _writable(ray.get(ref, timeout=ATTACH_TIMEOUT_S))
    except RayTaskError as error:
        raise HostStoreError(str(error.cause)) from error
    except RayError as error:
        raise HostStoreError(f"the node's keeper gave no memory: {error}") from error
    # The pages are there, but not yet in this process' page table: now is cheaper than later.
    memory[::_TOUCH_BYTES].max()
    try:
        slab = Slab(memory, identity, block_bytes)
    except SlabError:
        slab = Slab.format(memory, identity, block_bytes)
    return RayStore(slab, number, identity, node_keeper, clock)


def _grant(
    identity: bytes, size: int, grace_s: float
) -> tuple[ActorProxy[keeper.Keeper], keeper.Grant]:
    """A keeper that is just ending is waited for: the next one comes in its place."""
    owner = keeper.Owner.current()
    waits = iter(_RETRY_S)
    while True:
        try:
            node_keeper = keeper.of_this_node(grace_s)
            asked = node_keeper.attach.remote(owner, identity, size)
            return node_keeper, ray.get(asked, timeout=ATTACH_TIMEOUT_S)
        except GetTimeoutError:
            asked.future().add_done_callback(partial(_give_back, node_keeper, owner))
            raise
        except RayActorError:
            wait = next(waits, None)
            if wait is None:
                raise
            time.sleep(wait)


def _give_back(
    node_keeper: ActorProxy[keeper.Keeper], owner: keeper.Owner, late: Future[keeper.Grant]
) -> None:
    """Nobody waits for it any more, and while this process lives nobody else would get it."""
    if late.exception() is None:
        node_keeper.detach.remote(late.result()[0], owner)


def _is_ready(ref: ray.ObjectRef[Any]) -> bool:
    return bool(ray.wait([ref], timeout=0)[0])


class _Unlocked:
    """An object's view, said to be writable. Ray marks objects read-only but maps their memory
    for writing; what is written is seen by every process that holds a view of it."""

    def __init__(self, view: Memory) -> None:
        self._view = view
        interface = view.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _writable(view: Memory) -> Memory:
    """The same memory; it keeps `view`, which keeps the object."""
    return np.asarray(_Unlocked(view))
