"""How fast blocks move between a KV pool and host memory, beside a plain copy of the same size.

`python -m tests.benchmarks.swap`
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import ray
import torch

from replicas.core.block_transfer import OWN_SLAB
from replicas.host_store import HostStore, InProcessStore
from replicas.ray_store import attach
from replicas.slab import Slab

MIB = 2**20
TARGET = 0.5
TARGET_FROM_MIB = 16
_BLOCK = (3, 64, 64)
"""KV heads, tokens a block, head size."""
_SIZES = {1: (10, 1, 101), 16: (30, 6, 31), 256: (30, 91, 9)}
"""MiB to move: layers (a block's bytes grow with them), blocks, repetitions."""


class Mover:
    """A pool as it lies on the CPU, layer-major, and a store as large as the pool."""

    def __init__(self, store: HostStore, layers: int, blocks: int) -> None:
        self._store = store
        self._pool = torch.rand(layers, 2, blocks, *_BLOCK)
        self._moves = list(zip(random.sample(range(blocks), blocks), range(blocks), strict=True))
        self._digests = [slot.to_bytes(16, "big") for slot in range(blocks)]
        self._shape = (layers, 2, *_BLOCK)

    def out(self) -> None:
        for block, slot in self._moves:
            target = self._store.begin(slot).view(torch.float32).view(self._shape)
            target.copy_(self._pool[:, :, block])
            self._store.seal(slot, self._digests[slot])

    def back(self) -> None:
        for block, slot in self._moves:
            found = self._store.fetch((OWN_SLAB, slot), self._digests[slot])
            assert found is not None
            self._pool[:, :, block].copy_(found.view(torch.float32).view(self._shape))

    def check(self) -> None:
        """That what comes back is what went out."""
        before = self._pool.clone()
        self.out()
        self._pool.fill_(float("nan"))
        self.back()
        assert torch.equal(self._pool, before)


class Memcpy:
    """One contiguous copy, between two pieces of memory that have been touched."""

    def __init__(self, size: int) -> None:
        self._source = np.ones(size, dtype=np.uint8)
        self._target = np.zeros(size, dtype=np.uint8)

    def copy(self) -> None:
        np.copyto(self._target, self._source)


@contextmanager
def _ray_store(blocks: int, block_bytes: int) -> Iterator[HostStore]:
    size = Slab.size(blocks, block_bytes)
    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=max(80 * MIB, size * 5 // 4),
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    try:
        yield attach(bytes(16), size, block_bytes)
    finally:
        ray.shutdown()


def _measure(mib: int, quick: bool) -> dict[str, list[float]]:
    """GB/s of each way to move `mib`, run after run."""
    layers, blocks, times = _SIZES[mib]
    block_bytes = layers * 2 * int(np.prod(_BLOCK)) * torch.float32.itemsize
    size = blocks * block_bytes
    with _ray_store(blocks, block_bytes) as store:
        here = Mover(InProcessStore(blocks, block_bytes), layers, blocks)
        there = Mover(store, layers, blocks)
        ways: dict[str, Callable[[], None]] = {
            "memcpy": Memcpy(size).copy,
            "in process out": here.out,
            "in process in": here.back,
            "Ray out": there.out,
            "Ray in": there.back,
        }
        here.check()
        there.check()
        rates = defaultdict(list)
        for repetition in range(3 if quick else times + 1):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                seconds = time.perf_counter() - start
                if repetition:  # the first one warms
                    rates[name].append(size / seconds / 1e9)
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.swap", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two repetitions: no figures")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    missed = 0
    for mib in _SIZES:
        rates = _measure(mib, quick)
        plain = statistics.median(rates["memcpy"])
        for name, each in rates.items():
            rate = statistics.median(each)
            print(
                f"{mib:4} MiB  {name:15} {rate:6.2f} GB/s  {rate / plain:4.0%} of memcpy"
                f"  ({min(each):.2f}-{max(each):.2f})"
            )
            missed += mib >= TARGET_FROM_MIB and rate < TARGET * plain
    print(f"target: {TARGET:.0%} of memcpy from {TARGET_FROM_MIB} MiB on: {missed} missed")
    return min(missed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
