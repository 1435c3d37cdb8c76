"""How fast blocks move between a KV pool and host memory, beside a plain copy of the same size.

Seconds are CPU time of the thread that copies: what others run on its core in between is left out.

`python -m tests.benchmarks.swap`
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import ray
import torch

from replicas.core.block_transfer import OWN_SLAB, Restore, Save
from replicas.engine.host_copier import DirectCopier
from replicas.engine.kv_pool import RESERVED_BLOCKS, KVPool
from replicas.host_store import HostStore, InProcessStore
from replicas.models.spec import ModelSpec
from replicas.ray_store import attach
from replicas.slab import Slab

MIB = 2**20
TARGET = 0.5
TARGET_FROM_MIB = 16
_KV_HEADS, _BLOCK_SIZE, _HEAD_DIM = 3, 64, 64
_SIZES = {1: (10, 1, 101), 16: (30, 6, 31), 256: (30, 91, 9)}
"""MiB to move: layers (a block's bytes grow with them), blocks, repetitions."""


class Mover:
    """A pool as a CPU engine has it, the engine's copier, and a store as large as the pool."""

    def __init__(self, store: HostStore, pool: KVPool) -> None:
        self._pool = pool
        self._copier = DirectCopier(pool, store, time.perf_counter)
        blocks = range(RESERVED_BLOCKS, pool.num_blocks + RESERVED_BLOCKS)
        self._saves = [
            Save(block, slot, slot.to_bytes(16, "big"))
            for slot, block in enumerate(random.sample(blocks, pool.num_blocks))
        ]
        self._restores = [
            Restore((OWN_SLAB, save.slot), save.block, save.digest) for save in self._saves
        ]

    def out(self) -> None:
        self._carry_out(self._saves)

    def back(self) -> None:
        self._carry_out(self._restores)

    def check(self) -> None:
        """That what comes back is what went out."""
        blocks = self._pool.blocks[RESERVED_BLOCKS:]
        before = torch.rand_like(blocks)
        blocks.copy_(before)
        self.out()
        blocks.fill_(float("nan"))
        self.back()
        assert torch.equal(blocks, before)

    def _carry_out(self, copies: Sequence[Save | Restore]) -> None:
        self._copier.start(copies)
        assert all(each.ok for each in self._copier.ended())


class Memcpy:
    """One contiguous copy, between two pieces of memory that have been touched."""

    def __init__(self, size: int) -> None:
        self._source = np.ones(size, dtype=np.uint8)
        self._target = np.zeros(size, dtype=np.uint8)

    def copy(self) -> None:
        np.copyto(self._target, self._source)


def _pool(layers: int, blocks: int) -> KVPool:
    spec = ModelSpec(
        architecture="",
        num_layers=layers,
        num_heads=_KV_HEADS,
        kv_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        vocab_size=1,
        max_position=blocks * _BLOCK_SIZE,
        eos_token_ids=(),
        dtype="float32",
        fingerprint="",
        num_parameters=0,
    )
    return KVPool(
        spec, num_blocks=blocks, block_size=_BLOCK_SIZE, dtype=torch.float32, device="cpu"
    )


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
    pools = [_pool(layers, blocks) for _ in range(2)]
    block_bytes = pools[0].block_bytes
    size = blocks * block_bytes
    with _ray_store(blocks, block_bytes) as store:
        here = Mover(InProcessStore(blocks, block_bytes), pools[0])
        there = Mover(store, pools[1])
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
                start = time.thread_time()
                way()
                seconds = time.thread_time() - start
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
