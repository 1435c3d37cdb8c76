"""A slab's shape, and that a reader takes nothing but whole blocks of the digest it asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replicas.slab import Memory, Slab, SlabError

IDENTITY = b"a model's name\0\0"
BLOCK_BYTES = 1000
DIGESTS = [b"\0" * 15 + b"a", b"b" + b"\0" * 15, bytes(range(16)), bytes(16)]
"""Zeros lead, end, are within and are all there is."""


def memory_of(num_slots: int) -> Memory:
    return np.zeros(Slab.size(num_slots, BLOCK_BYTES), dtype=np.uint8)


def make(num_slots: int = 4) -> Slab:
    return Slab.format(memory_of(num_slots), IDENTITY, BLOCK_BYTES)


def block(seed: int) -> Memory:
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def write(slab: Slab, slot: int, digest: bytes, seed: int) -> None:
    slab.begin(slot)[:] = block(seed)
    slab.seal(slot, digest)


def read(slab: Slab, slot: int, digest: bytes) -> Memory | None:
    into = np.zeros(BLOCK_BYTES, dtype=np.uint8)
    return into if slab.read(slot, digest, into) else None


def test_blocks_come_back_as_they_were_by_copy_and_in_place() -> None:
    slab = make()
    for slot, digest in enumerate(DIGESTS):
        write(slab, slot, digest, slot)
    for slot, digest in enumerate(DIGESTS):
        for found in (read(slab, slot, digest), slab.view(slot, digest)):
            assert found is not None
            assert np.array_equal(found, block(slot))
    assert slab.entries() == list(enumerate(DIGESTS))


def test_another_opens_the_memory_and_finds_the_same() -> None:
    memory = memory_of(4)
    write(Slab.format(memory, IDENTITY, BLOCK_BYTES), 2, DIGESTS[1], seed=7)
    memory.flags.writeable = False
    reader = Slab(memory, IDENTITY, BLOCK_BYTES)
    assert reader.entries() == [(2, DIGESTS[1])]
    found = read(reader, 2, DIGESTS[1])
    assert found is not None
    assert np.array_equal(found, block(7))


def test_nothing_is_found_where_nothing_was_sealed() -> None:
    slab = make()
    assert slab.entries() == []
    assert read(slab, 0, bytes(16)) is None
    assert slab.view(0, bytes(16)) is None


@pytest.mark.parametrize("slot", [-1, 4, 10**6])
def test_a_slot_that_does_not_exist_holds_nothing(slot: int) -> None:
    slab = make(num_slots=4)
    write(slab, 3, DIGESTS[0], seed=1)
    assert read(slab, slot, DIGESTS[0]) is None


def test_a_slot_that_is_being_written_or_was_dropped_holds_nothing() -> None:
    slab = make()
    write(slab, 0, DIGESTS[0], seed=1)
    write(slab, 1, DIGESTS[1], seed=2)
    slab.begin(0)
    slab.drop(1)
    assert slab.entries() == []
    for slot in (0, 1):
        assert read(slab, slot, DIGESTS[slot]) is None
        assert slab.view(slot, DIGESTS[slot]) is None


def test_another_digest_is_not_found() -> None:
    slab = make()
    write(slab, 0, DIGESTS[0], seed=1)
    assert read(slab, 0, DIGESTS[1]) is None
    assert slab.view(0, DIGESTS[1]) is None


@pytest.mark.parametrize("at", [0, BLOCK_BYTES // 2, BLOCK_BYTES - 1])
def test_one_changed_bit_is_noticed(at: int) -> None:
    slab = make()
    write(slab, 0, DIGESTS[0], seed=1)
    slab.blocks[0, at] ^= 1
    assert read(slab, 0, DIGESTS[0]) is None
    assert slab.view(0, DIGESTS[0]) is None
    slab.blocks[0, at] ^= 1
    assert read(slab, 0, DIGESTS[0]) is not None


class Interrupted(np.ndarray[Any, np.dtype[np.uint8]]):
    """A reader's buffer: between a block's first and its last byte the owner does something."""

    meanwhile: Callable[[], object]

    def __setitem__(self, key: Any, value: Any) -> None:
        half = len(self) // 2
        plain = self.view(np.ndarray)
        plain[:half] = value[:half]
        self.meanwhile()
        plain[half:] = value[half:]


def read_while(slab: Slab, digest: bytes, meanwhile: Callable[[], object]) -> bool:
    into = np.zeros(BLOCK_BYTES, dtype=np.uint8).view(Interrupted)
    into.meanwhile = meanwhile
    return slab.read(0, digest, into)


def test_a_block_overwritten_while_it_is_copied_is_not_taken() -> None:
    slab = make()
    write(slab, 0, DIGESTS[0], seed=1)
    assert read_while(slab, DIGESTS[0], lambda: None)
    # Dropped, though its bytes are whole; another block; the same digest over other bytes.
    assert not read_while(slab, DIGESTS[0], lambda: slab.drop(0))
    write(slab, 0, DIGESTS[0], seed=1)
    assert not read_while(slab, DIGESTS[0], lambda: write(slab, 0, DIGESTS[1], seed=2))
    write(slab, 0, DIGESTS[0], seed=1)
    assert not read_while(slab, DIGESTS[0], lambda: write(slab, 0, DIGESTS[0], seed=3))


def test_an_old_digest_beside_a_newer_block_and_its_checksum_is_no_match() -> None:
    memory = memory_of(1)
    slab = Slab.format(memory, IDENTITY, BLOCK_BYTES)
    write(slab, 0, DIGESTS[0], seed=1)
    write(slab, 0, DIGESTS[1], seed=2)
    at = bytes(memory).index(DIGESTS[1])
    memory[at : at + 16] = np.frombuffer(DIGESTS[0], dtype=np.uint8)
    assert slab.entries() == [(0, DIGESTS[0])]
    assert read(slab, 0, DIGESTS[0]) is None


def test_the_generation_grows_with_every_change_a_reader_could_see() -> None:
    slab = make()
    seen = [slab.generation]
    slab.begin(0)
    slab.drop(1)
    assert slab.generation == seen[0]
    slab.seal(0, DIGESTS[0])
    seen.append(slab.generation)
    slab.begin(0)
    seen.append(slab.generation)
    slab.seal(0, DIGESTS[0])
    seen.append(slab.generation)
    slab.drop(0)
    seen.append(slab.generation)
    assert seen == sorted(set(seen))


def test_formatting_anew_empties_the_slab_and_its_readers_notice() -> None:
    memory = memory_of(4)
    slab = Slab.format(memory, IDENTITY, BLOCK_BYTES)
    write(slab, 0, DIGESTS[0], seed=1)
    seen = slab.generation
    Slab.format(memory, IDENTITY, BLOCK_BYTES)
    assert slab.generation > seen
    assert slab.entries() == []
    assert read(slab, 0, DIGESTS[0]) is None


@pytest.mark.parametrize(
    ("identity", "block_bytes", "named"),
    [
        (b"another's name\0\0", BLOCK_BYTES, "identity"),
        (IDENTITY, BLOCK_BYTES // 2, "num_slots"),
        (IDENTITY, BLOCK_BYTES - 1, "block_bytes"),
        (IDENTITY, 10**9, "hold no slot"),
    ],
)
def test_a_slab_of_another_kind_is_not_opened(
    identity: bytes, block_bytes: int, named: str
) -> None:
    memory = memory_of(4)
    Slab.format(memory, IDENTITY, BLOCK_BYTES)
    with pytest.raises(SlabError, match=named):
        Slab(memory, identity, block_bytes)


def test_memory_without_a_slab_is_not_opened() -> None:
    with pytest.raises(SlabError, match="magic"):
        Slab(memory_of(4), IDENTITY, BLOCK_BYTES)


@pytest.mark.parametrize("wrong", [b"", b"x" * 15, b"x" * 17])
def test_names_of_another_length_are_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match="identity has 16 bytes"):
        Slab.format(memory_of(4), wrong, BLOCK_BYTES)
    with pytest.raises(ValueError, match="digest has 16 bytes"):
        make().seal(0, wrong)


@pytest.mark.parametrize("block_bytes", [1, 100, 4064, 4096, 2_949_120])
def test_a_slab_takes_all_the_budget_it_can_use_and_never_more(block_bytes: int) -> None:
    for budget in (0, 63, 64, 4096, 4096 + block_bytes, 100_000, 9 * 2**20 + 12_345):
        num_slots = Slab.slots_within(budget, block_bytes)
        assert num_slots == 0 or Slab.size(num_slots, block_bytes) <= budget
        assert Slab.size(num_slots + 1, block_bytes) > budget
        assert Slab.slots_within(Slab.size(num_slots, block_bytes), block_bytes) == num_slots


def test_no_byte_lies_outside_the_budget() -> None:
    budget = 50_000
    memory = np.full(budget + 1000, 77, dtype=np.uint8)
    slab = Slab.format(memory[:budget], IDENTITY, BLOCK_BYTES)
    for slot in range(slab.num_slots):
        slab.begin(slot)[:] = 1
        slab.seal(slot, bytes([slot] * 16))
    assert slab.num_slots > 40
    assert (memory[budget:] == 77).all()
    assert len(slab.entries()) == slab.num_slots
