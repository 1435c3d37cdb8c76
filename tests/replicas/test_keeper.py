"""Slabs in a real Ray object store: who gets which, what outlives whom, and that nothing stays."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.util import list_named_actors

from replicas import keeper, ray_store
from replicas.core.block_transfer import OWN_SLAB
from replicas.host_store import HostStoreError
from replicas.keeper import Owner
from replicas.ray_store import DISCOVERY_S, RayStore, attach
from replicas.slab import Slab

BLOCK_BYTES = 65_536
SWAP_BYTES = 1_000_000
OTHER_SWAP_BYTES = 600_000
STORE_BYTES = 300_000_000
OURS, THEIRS = b"our model's name", b"other model name"
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
PATIENCE_S = 30.0


class Clock:
    """Time as discovery sees it, so that nobody waits for it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Replica:
    """A store in a process of its own, which can be killed."""

    def __init__(self) -> None:
        self._store = attach(OURS, SWAP_BYTES, BLOCK_BYTES)

    def write(self, slot: int, digest: bytes, seed: int) -> None:
        write(self._store, slot, digest, seed)

    def begin(self, slot: int) -> None:
        self._store.begin(slot).fill_(9)

    def owner(self) -> Owner:
        return Owner.current()


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _no_keeper_stays() -> Iterator[None]:
    assert not keepers()
    yield
    for name in keepers():
        ray.kill(ray.get_actor(name, keeper.NAMESPACE))
    wait_until(lambda: not keepers())


def keepers() -> list[str]:
    return [each["name"] for each in list_named_actors(all_namespaces=True)]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def block(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, generator=generator)


def write(store: RayStore, slot: int, digest: bytes, seed: int) -> None:
    store.begin(slot).copy_(block(seed))
    store.seal(slot, digest)


def holds(store: RayStore, source: tuple[int, int] | None, digest: bytes, seed: int) -> bool:
    found = None if source is None else store.fetch(source, digest)
    return found is not None and torch.equal(found, block(seed))


def discover(store: RayStore, clock: Clock, digest: bytes) -> tuple[int, int] | None:
    """What `find` says as soon as it says something, or after two answers of the keeper."""
    for _ in range(2):
        clock.now += DISCOVERY_S
        ray.wait([store._listing])
        if (source := store.find(digest)) is not None:
            return source
    return None


def granted(identity: bytes) -> list[keeper.Grant]:
    return ray.get(keeper.of_this_node().slabs.remote(identity))


def dead_owner() -> Owner:
    return Owner(os.getpid(), Owner.current().start_time - 1)


def in_object_store(memory: Any) -> bool:
    """Whether it lies in shared memory and not in a file that Ray fell back to."""
    address = memory.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= address < end:
            return "/dev/shm/" in line
    return False


def test_blocks_come_back_and_the_slab_keeps_within_its_budget() -> None:
    store = attach(OURS, SWAP_BYTES, BLOCK_BYTES)
    assert store.num_slots == Slab.slots_within(SWAP_BYTES, BLOCK_BYTES) == 15
    [(_, [ref])] = granted(OURS)
    memory = ray.get(ref)
    assert memory.nbytes <= SWAP_BYTES
    assert in_object_store(memory)
    for slot in range(store.num_slots):
        write(store, slot, bytes([slot] * 16), slot)
    assert store.inventory() == [(slot, bytes([slot] * 16)) for slot in range(15)]
    assert all(holds(store, (OWN_SLAB, s), bytes([s] * 16), s) for s in range(15))
    assert store.fetch((OWN_SLAB, 3), A) is None
    store.drop(3)
    assert store.fetch((OWN_SLAB, 3), bytes([3] * 16)) is None


def test_a_swap_space_below_one_block_is_refused() -> None:
    with pytest.raises(HostStoreError, match="60,000 bytes holds no block of 65,536"):
        attach(OURS, 60_000, BLOCK_BYTES)


def test_neighbours_find_each_others_blocks_and_never_their_own() -> None:
    clock = Clock()
    ours = attach(OURS, SWAP_BYTES, BLOCK_BYTES, clock=clock)
    neighbour = attach(OURS, SWAP_BYTES, BLOCK_BYTES)
    stranger = attach(THEIRS, SWAP_BYTES, BLOCK_BYTES)
    write(ours, 0, A, seed=1)
    write(neighbour, 4, B, seed=2)
    write(stranger, 4, C, seed=3)
    source = discover(ours, clock, B)
    assert source is not None
    assert source[0] != OWN_SLAB
    assert holds(ours, source, B, seed=2)
    assert ours.fetch(source, A) is None
    assert (discover(ours, clock, A), discover(ours, clock, C)) == (None, None)
    neighbour.begin(4)
    assert ours.fetch(source, B) is None


def test_blocks_outlive_their_writer_for_neighbours_and_for_its_successor() -> None:
    clock = Clock()
    neighbour = attach(OURS, OTHER_SWAP_BYTES, BLOCK_BYTES, clock=clock)
    writer = ray.remote(Replica).options(num_cpus=0).remote()
    ray.get([writer.write.remote(3, A, 1), writer.write.remote(7, B, 2), writer.begin.remote(5)])
    owner = ray.get(writer.owner.remote())
    assert owner.is_alive()
    os.kill(owner.pid, signal.SIGKILL)
    wait_until(lambda: not owner.is_alive())

    for digest, seed in ((A, 1), (B, 2)):
        assert holds(neighbour, discover(neighbour, clock, digest), digest, seed)
    known = len(granted(OURS))

    successor = attach(OURS, SWAP_BYTES, BLOCK_BYTES)
    assert len(granted(OURS)) == known
    assert successor.inventory() == [(3, A), (7, B)]
    assert holds(successor, (OWN_SLAB, 7), B, seed=2)
    write(successor, 7, C, seed=3)
    assert holds(neighbour, discover(neighbour, clock, C), C, seed=3)
    # Its owner lives now: nobody else gets it.
    assert attach(OURS, SWAP_BYTES, BLOCK_BYTES).inventory() == []


@pytest.mark.parametrize(
    ("identity", "swap_bytes"), [(THEIRS, SWAP_BYTES), (OURS, OTHER_SWAP_BYTES)]
)
def test_a_slab_of_another_kind_is_not_taken_over(identity: bytes, swap_bytes: int) -> None:
    first = attach(OURS, SWAP_BYTES, BLOCK_BYTES)
    write(first, 0, A, seed=1)
    first.close()
    assert attach(identity, swap_bytes, BLOCK_BYTES).inventory() == []
    assert attach(OURS, SWAP_BYTES, BLOCK_BYTES).inventory() == [(0, A)]


def test_blocks_of_another_size_in_a_slab_taken_over_are_dropped() -> None:
    first = attach(OURS, SWAP_BYTES, BLOCK_BYTES)
    write(first, 0, A, seed=1)
    first.close()
    size = Slab.size(15, BLOCK_BYTES)
    second = attach(OURS, size, size - 4096)
    assert (second.num_slots, second.inventory()) == (1, [])


def test_without_a_keeper_the_own_slab_works_on_and_a_new_keeper_starts() -> None:
    clock = Clock()
    ours = attach(OURS, SWAP_BYTES, BLOCK_BYTES, clock=clock)
    neighbour = attach(OURS, SWAP_BYTES, BLOCK_BYTES)
    write(ours, 0, A, seed=1)
    write(neighbour, 0, B, seed=2)
    assert discover(ours, clock, B) is not None
    ray.kill(keeper.of_this_node())
    wait_until(lambda: not keepers())

    # The first of two answers had been given before.
    assert discover(ours, clock, C) is None
    assert ours.find(B) is None
    assert holds(ours, (OWN_SLAB, 0), A, seed=1)
    write(ours, 1, B, seed=3)
    assert holds(ours, (OWN_SLAB, 1), B, seed=3)
    assert attach(OURS, SWAP_BYTES, BLOCK_BYTES).inventory() == []
    assert len(keepers()) == 1
    # Memory that was taken since is not that of the old slab.
    assert holds(ours, (OWN_SLAB, 0), A, seed=1)
    ours.close()


def test_a_slab_that_does_not_fit_is_refused_with_both_figures() -> None:
    left = STORE_BYTES * 9 // 10
    with pytest.raises(HostStoreError) as refused:
        attach(OURS, STORE_BYTES, BLOCK_BYTES)
    size = Slab.size(Slab.slots_within(STORE_BYTES, BLOCK_BYTES), BLOCK_BYTES)
    assert re.findall(r"\d[\d,]+", str(refused.value)) == [
        f"{bytes_:,}" for bytes_ in (size, left, STORE_BYTES)
    ]
    assert granted(OURS) == []


def test_the_dead_make_room_for_the_living_but_the_living_do_not() -> None:
    size = STORE_BYTES // 2
    first = attach(OURS, size, BLOCK_BYTES)
    with pytest.raises(HostStoreError, match="does not fit"):
        attach(THEIRS, size, BLOCK_BYTES)
    first.close()
    second = attach(THEIRS, size, BLOCK_BYTES)
    [(_, [ref])] = granted(THEIRS)
    assert in_object_store(ray.get(ref))
    assert granted(OURS) == []
    write(second, 0, A, seed=1)
    assert holds(second, (OWN_SLAB, 0), A, seed=1)


def test_a_farewell_that_comes_late_takes_nothing_from_the_successor() -> None:
    actor = keeper.of_this_node()
    dead, living = dead_owner(), Owner.current()
    number, _ = ray.get(actor.attach.remote(dead, OURS, SWAP_BYTES))
    again, _ = ray.get(actor.attach.remote(living, OURS, SWAP_BYTES))
    ray.get(actor.detach.remote(number, dead))
    other, _ = ray.get(actor.attach.remote(living, OURS, SWAP_BYTES))
    assert again == number
    assert other != number, "two would write one slab"
    ray.get(actor.detach.remote(number, living))
    assert ray.get(actor.attach.remote(living, OURS, SWAP_BYTES))[0] == number


def test_two_that_ask_at_once_do_not_get_the_same_room() -> None:
    actor = keeper.of_this_node()
    size = STORE_BYTES // 2
    refused = []
    for asked in [actor.attach.remote(Owner.current(), each, size) for each in (OURS, THEIRS)]:
        try:
            ray.get(asked)
        except keeper.NoRoomError as error:
            refused.append(str(error))
    assert len(refused) == 1
    assert "120,000,000 of the node's" in refused[0]


def test_memory_that_a_neighbour_holds_on_to_is_not_replaced_by_a_file() -> None:
    size, clock = STORE_BYTES // 2, Clock()
    actor = keeper.of_this_node(grace_s=6.0)
    neighbour = attach(OURS, OTHER_SWAP_BYTES, BLOCK_BYTES, clock=clock)
    first = attach(OURS, size, BLOCK_BYTES)
    write(first, 0, A, seed=1)
    source = discover(neighbour, clock, A)
    first.close()
    del first
    with pytest.raises(HostStoreError, match="others use more than 10% of the node's 300,000,000"):
        attach(THEIRS, size, BLOCK_BYTES)
    # Not an error to the neighbour, who lets go as soon as it hears of it.
    assert holds(neighbour, source, A, seed=1)
    asked = actor.attach.remote(Owner.current(), THEIRS, size)
    time.sleep(0.5)
    assert granted(THEIRS) == []
    wait_until(lambda: discover(neighbour, clock, A) is None)
    _, [ref] = ray.get(asked)
    assert in_object_store(ray.get(ref))


def test_a_slab_that_came_too_late_for_a_replica_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper.of_this_node(grace_s=2.0)
    monkeypatch.setattr(ray_store, "ATTACH_TIMEOUT_S", 0.0)
    with pytest.raises(HostStoreError, match="gave no memory"):
        attach(OURS, SWAP_BYTES, BLOCK_BYTES)
    wait_until(lambda: not keepers())


def test_slabs_of_the_dead_are_freed_after_the_grace_period_and_the_keeper_ends() -> None:
    actor = keeper.of_this_node(grace_s=1.0)
    ray.get(actor.attach.remote(dead_owner(), THEIRS, SWAP_BYTES))
    ours = attach(OURS, SWAP_BYTES, BLOCK_BYTES)
    start = time.monotonic()
    wait_until(lambda: not ray.get(actor.slabs.remote(THEIRS)))
    assert time.monotonic() - start > 0.5
    time.sleep(1.5)
    assert len(granted(OURS)) == 1
    ours.close()
    wait_until(lambda: not keepers())


def test_a_keeper_without_owners_ends_by_itself() -> None:
    keeper.of_this_node(grace_s=0.2)
    wait_until(lambda: not keepers())


def test_an_owner_is_one_process_and_not_its_pid() -> None:
    assert Owner.current().is_alive()
    assert not dead_owner().is_alive()
    with subprocess.Popen(["sleep", "60"]) as process:
        stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        owner = Owner(process.pid, int(stat[19]))
        assert owner.is_alive()
        process.kill()
        # Killed, and not yet waited for: still in the process table.
        wait_until(lambda: not owner.is_alive())
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, 0)
    assert not owner.is_alive()


def test_an_owner_that_cannot_be_looked_at_is_not_taken_for_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = Owner.current()

    def refuse(_: int) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(keeper, "_stat", refuse)
    assert owner.is_alive()
