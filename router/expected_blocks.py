"""Blocks that replicas do not have yet, but soon will."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ExpectedBlocks:
    """Digest -> replicas, as bits. Apart from the blocks that are held: a decision adds hundreds
    of them, and these few thousand stay in the processor's cache, where a table of ten million
    does not."""

    def __init__(self) -> None:
        self._bits: dict[bytes, int] = {}
        self._digests: dict[int, dict[bytes, None]] = {}
        """The same by replica. No sets, as the garbage collector looks through each of them."""
        self.of = self._bits.get
        """`of(digest, 0)`: whose it will be; the dict's own method, as walks call it by step."""

    def __len__(self) -> int:
        return len(self._bits)

    def add(self, bit: int, digests: Sequence[bytes]) -> None:
        """A replica will have them."""
        bits = self._bits
        for digest in digests:
            bits[digest] = bits.get(digest, 0) | bit
        self._digests.setdefault(bit, {}).update(dict.fromkeys(digests))

    def discard(self, bit: int, digests: Iterable[bytes]) -> None:
        """A replica has them by now, or never will; unknown ones are fine."""
        bits, its = self._bits, self._digests.get(bit, {})
        for digest in its.keys() & digests:
            del its[digest]
            if left := bits[digest] & ~bit:
                bits[digest] = left
            else:
                del bits[digest]

    def clear(self, bit: int) -> None:
        """Nothing is expected of a replica."""
        self.discard(bit, self._digests.get(bit, ()))
