"""Sets of holders, one object each, so that a block costs no more than the number of its set."""

from __future__ import annotations

import itertools
from enum import IntEnum
from typing import NamedTuple


class Tier(IntEnum):
    """Where a replica holds a block."""

    DEVICE = 0
    HOST = 1


class Masks(NamedTuple):
    """The holders of a block in each tier: bit `i` stands for slot `i`, which is a replica."""

    device: int = 0
    host: int = 0

    def with_bit(self, tier: Tier, bit: int) -> Masks:
        """A replica has it in `tier` now."""
        device, host = self
        return Masks(device | bit, host) if tier is Tier.DEVICE else Masks(device, host | bit)

    def without_bit(self, tiers: tuple[Tier, ...], bit: int) -> Masks:
        """A replica has it in none of `tiers`."""
        return Masks(
            *(m & ~bit if tier in tiers else m for tier, m in zip(Tier, self, strict=True))
        )


NOBODY = Masks()
NO_SET = 0
"""The number of the set without holders. No block refers to it: such blocks are not listed."""


class HolderSet:
    """Who holds some blocks; they refer to it by `number`."""

    __slots__ = ("blocks", "masks", "number", "reach", "reach_version")

    def __init__(self, number: int, masks: Masks) -> None:
        self.number = number
        self.blocks = 0
        """That refer to it."""
        self.assign(masks)

    def assign(self, masks: Masks) -> None:
        self.masks = masks
        self.reach = 0
        """Replicas that can read the blocks from host memory, as of `reach_version`."""
        self.reach_version = -1


class HolderSets:
    """All sets that a block refers to; one that no block refers to is let go.

    Blocks keep a number instead of the object, because a dict of bytes and ints is none of the
    garbage collector's business, and one of ten million objects would stop everything for long.
    """

    def __init__(self) -> None:
        nobody = HolderSet(NO_SET, NOBODY)
        self.by_number = {NO_SET: nobody}
        self._by_masks = {NOBODY: nobody}
        self._numbers = itertools.count(NO_SET + 1)

    def __len__(self) -> int:
        """Sets in use."""
        return len(self.by_number) - 1

    def intern(self, masks: Masks) -> HolderSet:
        """The set with these masks; `let_go` of it unless some block comes to refer to it."""
        found = self._by_masks.get(masks)
        if found is None:
            found = HolderSet(next(self._numbers), masks)
            self.by_number[found.number] = self._by_masks[masks] = found
        return found

    def let_go(self, number: int) -> None:
        """Forget the set if no block refers to it."""
        holders = self.by_number.get(number)
        if holders is not None and holders.blocks == 0 and number != NO_SET:
            self._unlist(holders)
            del self.by_number[number]

    def strip(self, tiers: tuple[Tier, ...], bit: int) -> int:
        """Take a replica out of all sets; gives the number of blocks whose last holder it was.

        The work is in proportion to the sets, however many blocks refer to them. Two sets may
        have equal masks afterwards, which costs nothing but the second object.
        """
        orphaned = 0
        for holders in self.by_number.values():
            masks = holders.masks.without_bit(tiers, bit)
            if masks == holders.masks:
                continue
            self._unlist(holders)
            holders.assign(masks)
            if masks == NOBODY:
                orphaned += holders.blocks
            else:
                self._by_masks.setdefault(masks, holders)
        return orphaned

    def _unlist(self, holders: HolderSet) -> None:
        if self._by_masks.get(holders.masks) is holders:
            del self._by_masks[holders.masks]
