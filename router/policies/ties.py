"""Equals are told apart by a hash of request and replica: spread, yet the same every time."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def by_rendezvous(key: bytes, replicas: Iterable[str]) -> list[str]:
    """Highest hash first. A replica that comes or goes moves only what it wins or had won, and
    every router comes to the same order."""
    return sorted(replicas, key=lambda replica: (_weight(key, replica), replica), reverse=True)


def _weight(key: bytes, replica: str) -> bytes:
    return blake2b(replica.encode(), digest_size=8, key=key[:64]).digest()
