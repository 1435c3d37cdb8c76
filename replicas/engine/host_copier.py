"""Carries out copies of blocks between the KV pool and host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from replicas.core.block_transfer import EndedCopy, Restore, Save
from replicas.engine.kv_pool import KVPool
from replicas.host_store import HostStore


class HostCopier(Protocol):
    """Copies in two phases: they are started, and some time later they have ended.

    Each started copy ends once, well or not, and then touches its block no more. Copies may
    run beside the steps that follow; the scheduler sees to it that nobody else writes what
    they read, or reads what they write.
    """

    def start(self, copies: Sequence[Save | Restore]) -> None:
        """Begin, behind every step launched so far: saves see what these write, and restores fill
        no block that these still use."""
        ...

    def ended(self) -> list[EndedCopy]:
        """The copies that have ended since the last call."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until a copy has ended, but not longer."""
        ...


class DirectCopier:
    """Copies between steps, on the engine's thread: on a CPU a thread that copies beside the
    step takes from the step what it gains."""

    def __init__(self, pool: KVPool, store: HostStore, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._store = store
        self._clock = clock
        self._ended: list[EndedCopy] = []

    def start(self, copies: Sequence[Save | Restore]) -> None:
        """Carry all of them out."""
        for copy in copies:
            begin = self._clock()
            ok = self._save(copy) if isinstance(copy, Save) else self._restore(copy)
            self._ended.append(EndedCopy(copy, ok, self._clock() - begin))

    def ended(self) -> list[EndedCopy]:
        """All that were started since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_s: float) -> None:
        """There is never anything to wait for."""

    def _save(self, save: Save) -> bool:
        self._pool.export(save.block, self._store.begin(save.slot))
        self._store.seal(save.slot, save.digest)
        return True

    def _restore(self, restore: Restore) -> bool:
        content = self._store.fetch(restore.source, restore.digest)
        if content is None:
            return False
        self._pool.load(restore.block, content)
        return True
