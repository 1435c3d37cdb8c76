"""Blocks in raw memory that other processes read while its owner writes: no locks, no trust.

A slab is a header, an index of one record a slot, and the slots' bytes. Its owner alone writes.
A reader copies a block first and then asks whether the copy is what it wanted: the record must
name the wanted digest, and the copy must have the record's checksum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

Memory = NDArray[np.uint8]

DIGEST_BYTES = 16
IDENTITY_BYTES = 16

_MAGIC = int.from_bytes(b"QuireKV\0", "little")
_VERSION = 1
_ALIGNMENT = 4096
"""Of the slots' region, so that the owner's index does not share a page with blocks."""
_EMPTY, _SEALED = 0, 1

_HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u8"),
        ("identity", f"V{IDENTITY_BYTES}"),
        ("num_slots", "<u8"),
        ("block_bytes", "<u8"),
        ("generation", "<u8"),
    ]
)
_RECORD = np.dtype([("digest", f"V{DIGEST_BYTES}"), ("checksum", "<u8"), ("state", "<u8")])


class SlabError(ValueError):
    """The memory holds no slab, or one of another identity, layout or shape."""


class Slab:
    """Slots of `block_bytes` each over `memory`, which must already hold a slab; see `format`.

    `identity` (16 bytes) names the content's kind: blocks of another model or layout are never
    taken for ours. Raises SlabError where the memory holds anything else.
    """

    def __init__(self, memory: Memory, identity: bytes, block_bytes: int) -> None:
        wanted = _description(memory, identity, block_bytes)
        header = memory[: _HEADER.itemsize].view(_HEADER)
        for name, value in wanted.items():
            if header[name].tobytes() != _field(name, value).tobytes():
                raise SlabError(f"the memory holds no slab with this {name}: {value!r}")
        self.num_slots = num_slots = Slab.slots_within(memory.nbytes, block_bytes)
        self.block_bytes = block_bytes
        start, end = _data_start(num_slots), Slab.size(num_slots, block_bytes)
        self.blocks: Memory = memory[start:end].reshape(num_slots, block_bytes)
        """[num_slots, block_bytes]."""
        self._generation = header["generation"]
        index = memory[_HEADER.itemsize : _index_end(num_slots)].view(_RECORD)
        self._records = index
        self._digests = index["digest"]
        self._checksums = index["checksum"]
        self._states = index["state"]

    @classmethod
    def format(cls, memory: Memory, identity: bytes, block_bytes: int) -> Slab:
        """Make an empty slab of as many slots as fit; raises ValueError where none does."""
        header = memory[: _HEADER.itemsize].view(_HEADER)
        fields = _description(memory, identity, block_bytes)
        generation = int(header["generation"][0])
        # No reader takes this for a slab before it is one: the magic goes first and comes last.
        header["magic"] = 0
        memory[_HEADER.itemsize : _index_end(fields["num_slots"])] = 0
        for name in reversed(fields):
            header[name] = _field(name, fields[name])
        slab = cls(memory, identity, block_bytes)
        slab._generation[0] = (generation + 1) % 2**64
        return slab

    @staticmethod
    def size(num_slots: int, block_bytes: int) -> int:
        """Bytes of a whole slab, header and index included."""
        return _data_start(num_slots) + num_slots * block_bytes

    @staticmethod
    def slots_within(budget: int, block_bytes: int) -> int:
        """How many slots a slab has that takes at most `budget` bytes as a whole; may be 0."""
        num_slots = max(0, budget - _HEADER.itemsize) // (block_bytes + _RECORD.itemsize)
        while num_slots and Slab.size(num_slots, block_bytes) > budget:
            num_slots -= 1
        return num_slots

    @property
    def generation(self) -> int:
        """Grows whenever a slot begins or ceases to hold a block."""
        return int(self._generation[0])

    def begin(self, slot: int) -> Memory:
        """Forget what the slot held and give its bytes to write: [block_bytes]."""
        self.drop(slot)
        return self.blocks[slot]

    def seal(self, slot: int, digest: bytes) -> None:
        """Publish the slot's bytes as the block `digest` (16 bytes)."""
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(digest)}")
        self._checksums[slot] = _checksum(self.blocks[slot], digest)
        self._digests[slot] = np.void(digest)
        self._states[slot] = _SEALED
        self._generation += 1

    def drop(self, slot: int) -> None:
        """Forget what the slot held: readers find nothing there."""
        if self._states[slot] == _SEALED:
            self._states[slot] = _EMPTY
            self._generation += 1

    def entries(self) -> list[tuple[int, bytes]]:
        """(slot, digest) of every sealed slot, by slot."""
        records = self._records.copy()
        slots = np.flatnonzero(records["state"] == _SEALED)
        digests = records["digest"][slots].tobytes()
        return [
            (slot, digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES])
            for at, slot in enumerate(slots.tolist())
        ]

    def view(self, slot: int, digest: bytes) -> Memory | None:
        """The slot's own bytes if they are the block `digest`. For the owner: to anyone else they
        may change after the check."""
        block = self.blocks[slot]
        return block if self._is(slot, digest, block) else None

    def read(self, slot: int, digest: bytes, into: Memory) -> bool:
        """Copy a slot into `into` ([block_bytes]); False where what arrived is not the whole
        block `digest`, whatever the owner does meanwhile."""
        if not 0 <= slot < self.num_slots or not self._names(slot, digest):
            return False
        into[:] = self.blocks[slot]
        return self._is(slot, digest, into)

    def _names(self, slot: int, digest: bytes) -> bool:
        return self._states[slot] == _SEALED and self._digests[slot].tobytes() == digest

    def _is(self, slot: int, digest: bytes, block: Memory) -> bool:
        if not self._names(slot, digest):
            return False
        return int(self._checksums[slot]) == _checksum(block, digest)


def _checksum(block: Memory, digest: bytes) -> int:
    # Seeded with the digest: where stores become visible out of order, an old digest beside a
    # newer block and its checksum is no match.
    return xxhash.xxh3_64_intdigest(block.data, seed=int.from_bytes(digest[:8], "little"))


def _description(memory: Memory, identity: bytes, block_bytes: int) -> dict[str, Any]:
    if len(identity) != IDENTITY_BYTES:
        raise ValueError(f"an identity has {IDENTITY_BYTES} bytes, not {len(identity)}")
    num_slots = Slab.slots_within(memory.nbytes, block_bytes)
    if not num_slots:
        raise SlabError(f"{memory.nbytes:,} bytes hold no slot of {block_bytes:,}")
    return {
        "magic": _MAGIC,
        "version": _VERSION,
        "identity": identity,
        "num_slots": num_slots,
        "block_bytes": block_bytes,
    }


def _field(name: str, value: int | bytes) -> NDArray[Any]:
    content = np.void(value) if isinstance(value, bytes) else value
    return np.array([content], dtype=_HEADER[name])


def _index_end(num_slots: int) -> int:
    return _HEADER.itemsize + num_slots * _RECORD.itemsize


def _data_start(num_slots: int) -> int:
    return -(-_index_end(num_slots) // _ALIGNMENT) * _ALIGNMENT
