"""The in-process store, and how neighbours are searched and read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from replicas.core.block_transfer import OWN_SLAB
from replicas.host_store import HostStore, InProcessStore
from replicas.neighbours import RESCAN_S, Neighbours
from replicas.slab import Slab

BLOCK_BYTES = 512
A, B = b"a" * 16, b"b" * 16
IDENTITY = bytes(16)


class Clock:
    """Stands still until told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def write(store: HostStore, slot: int, digest: bytes, seed: int) -> torch.Tensor:
    block = torch.randint(0, 256, (BLOCK_BYTES,), dtype=torch.uint8, generator=seeded(seed))
    store.begin(slot).copy_(block)
    store.seal(slot, digest)
    return block


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_blocks_come_back_as_they_were() -> None:
    store: HostStore = InProcessStore(3, BLOCK_BYTES)
    assert (store.num_slots, store.block_bytes) == (3, BLOCK_BYTES)
    written = [write(store, slot, digest, slot) for slot, digest in ((0, A), (2, B))]
    assert store.inventory() == [(0, A), (2, B)]
    for block, (slot, digest) in zip(written, store.inventory(), strict=True):
        found = store.fetch((OWN_SLAB, slot), digest)
        assert found is not None
        assert torch.equal(found, block)


@pytest.mark.parametrize("elements", [torch.float32, torch.bfloat16])
def test_a_slot_can_be_written_as_what_it_holds(elements: torch.dtype) -> None:
    store = InProcessStore(3, BLOCK_BYTES)
    numbers = torch.randn(BLOCK_BYTES // elements.itemsize, generator=seeded(1)).to(elements)
    store.begin(1).view(elements).copy_(numbers)
    store.seal(1, A)
    found = store.fetch((OWN_SLAB, 1), A)
    assert found is not None
    assert torch.equal(found.view(elements), numbers)


def test_what_is_not_there_whole_is_not_fetched() -> None:
    store = InProcessStore(2, BLOCK_BYTES)
    write(store, 0, A, seed=1)
    assert store.fetch((OWN_SLAB, 1), A) is None
    assert store.fetch((OWN_SLAB, 0), B) is None
    assert store.fetch((OWN_SLAB + 1, 0), A) is None
    store.begin(0)
    assert store.fetch((OWN_SLAB, 0), A) is None
    write(store, 0, A, seed=1)
    store.drop(0)
    assert store.fetch((OWN_SLAB, 0), A) is None
    bytes_of_slot = store.begin(0)
    store.seal(0, A)
    bytes_of_slot[3] += 1
    assert store.fetch((OWN_SLAB, 0), A) is None


def test_a_process_of_its_own_has_no_neighbours() -> None:
    store = InProcessStore(2, BLOCK_BYTES)
    write(store, 0, A, seed=1)
    assert store.find(A) is None


def make_slab(num_slots: int = 4) -> Slab:
    memory = np.zeros(Slab.size(num_slots, BLOCK_BYTES), dtype=np.uint8)
    return Slab.format(memory, IDENTITY, BLOCK_BYTES)


def seal(slab: Slab, slot: int, digest: bytes) -> None:
    slab.begin(slot)[:] = slot
    slab.seal(slot, digest)


def test_neighbours_are_found_and_read_by_number() -> None:
    neighbours = Neighbours(Clock())
    for number, digest in ((3, A), (8, B)):
        slab = make_slab()
        seal(slab, number // 3, digest)
        neighbours.add(number, slab)
    assert (neighbours.find(A), neighbours.find(B)) == ((3, 1), (8, 2))
    into = np.zeros(BLOCK_BYTES, dtype=np.uint8)
    assert neighbours.read((8, 2), B, into)
    assert (into == 2).all()
    assert not neighbours.read((8, 2), A, into)
    assert not neighbours.read((4, 2), B, into)


def test_neighbours_that_left_are_forgotten() -> None:
    neighbours = Neighbours(Clock())
    for number, digest in ((1, A), (2, B)):
        slab = make_slab()
        seal(slab, 0, digest)
        neighbours.add(number, slab)
    neighbours.keep({2, 5})
    assert (1 in neighbours, 2 in neighbours, 5 in neighbours) == (False, True, False)
    assert (neighbours.find(A), neighbours.find(B)) == (None, (2, 0))
    assert not neighbours.read((1, 0), A, np.zeros(BLOCK_BYTES, dtype=np.uint8))


def test_a_neighbours_index_is_read_when_it_changed_and_not_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, slab = Clock(), make_slab()
    scans = 0

    def counted(each: Slab) -> list[tuple[int, bytes]]:
        nonlocal scans
        scans += 1
        return entries(each)

    entries = Slab.entries
    monkeypatch.setattr(Slab, "entries", counted)
    neighbours = Neighbours(clock)
    neighbours.add(1, slab)
    assert neighbours.find(A) is None
    seal(slab, 0, A)
    # The last look was just now.
    assert (neighbours.find(A), scans) == (None, 1)
    clock.now += RESCAN_S
    assert (neighbours.find(A), scans) == ((1, 0), 2)
    clock.now += 10 * RESCAN_S
    # Nothing has changed.
    assert (neighbours.find(A), neighbours.find(B), scans) == ((1, 0), None, 2)
    slab.drop(0)
    assert (neighbours.find(A), scans) == (None, 3)
