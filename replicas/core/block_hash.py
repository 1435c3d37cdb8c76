"""The identity of a full KV block: a chained, keyed hash of everything its content depends on."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
LAYOUT_VERSION = 1
"""Raise it when the bytes of a block change their meaning."""


class BlockHasher:
    """Hashes token blocks so that equal digests mean equal KV on any replica.

    A digest covers the model's fingerprint, the KV dtype and its scales, the block size, the
    layout version, the adapter, the cache salt and ALL token ids up to the block's end.
    BLAKE2b is collision resistant, so KV is shared by digest without comparing tokens. The
    key comes from these alone: every process computes the same digests.
    """

    def __init__(
        self,
        *,
        fingerprint: str,
        kv_dtype: str,
        block_size: int,
        kv_scales: str = "",
        adapter: str = "",
    ) -> None:
        """`kv_scales` names the scales that stored values are multiplied by, where there are."""
        self.block_size = block_size
        self._format = struct.Struct(f"<{block_size}I")
        scope = (fingerprint, kv_dtype, kv_scales, str(block_size), str(LAYOUT_VERSION), adapter)
        self._key = blake2b(_frame(scope), digest_size=32).digest()

    def identity(self, layout: str) -> bytes:
        """What blocks must have in common, beside their digests, to be exchanged as bytes: 16
        bytes, of all that digests cover but tokens and salts, and of the `layout` in memory."""
        scope = _frame(("identity", layout))
        return blake2b(scope, digest_size=DIGEST_BYTES, key=self._key).digest()

    def root(self, cache_salt: str = "", *private: str) -> bytes:
        """The parent of a prompt's first block; `private` names make it nobody else's."""
        scope = _frame((cache_salt, *private))
        return blake2b(scope, digest_size=DIGEST_BYTES, key=self._key).digest()

    def extend(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The digest of the block with `token_ids` (exactly `block_size`) after `parent`."""
        content = parent + self._format.pack(*token_ids)
        return blake2b(content, digest_size=DIGEST_BYTES, key=self._key).digest()

    def chain(self, token_ids: Sequence[int], cache_salt: str = "") -> list[bytes]:
        """The digests of all full blocks of `token_ids`, first block first."""
        parent, chain = self.root(cache_salt), []
        size = self.block_size
        for end in range(size, len(token_ids) + 1, size):
            parent = self.extend(parent, token_ids[end - size : end])
            chain.append(parent)
        return chain


def _frame(fields: tuple[str, ...]) -> bytes:
    """Length-prefixed, so that ("ab", "c") and ("a", "bc") differ."""
    encoded = [field.encode() for field in fields]
    return b"".join(struct.pack("<Q", len(field)) + field for field in encoded)
