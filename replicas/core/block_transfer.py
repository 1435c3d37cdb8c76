"""Copies of blocks between the device's pool and host memory, as values."""

from __future__ import annotations

from dataclasses import dataclass

Location = tuple[int, int]
"""(slab, slot) in host memory. Slab 0 is the replica's own; others belong to its neighbours."""

OWN_SLAB = 0


@dataclass(frozen=True, slots=True)
class Save:
    """Write a device block into a slot of the own slab."""

    block: int
    slot: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Restore:
    """Fill a device block from host memory, if the content there is that of `digest`."""

    source: Location
    block: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class EndedCopy:
    """A copy that ended: neither its block nor its slot is touched by it any more."""

    copy: Save | Restore
    ok: bool
    """False where it failed or came late, or where the content was torn or another."""
    seconds: float
    """That the copy itself took, waiting for others left out."""
