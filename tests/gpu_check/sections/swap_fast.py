"""Blocks to the host and back by the engine's own copier, what that does to decoding beside it, and
from which context on it is quicker than computing again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from replicas.config import EngineConfig
from replicas.core.block_transfer import OWN_SLAB, Restore, Save
from replicas.engine import device_side
from replicas.engine.engine import Engine
from replicas.engine.kv_format import KVFormat
from replicas.engine.kv_pool import KVPool
from replicas.host_store import InProcessStore
from replicas.models.hf_adapter import PagedModel
from tests.gpu_check import rig as names
from tests.gpu_check.engine_bench import (
    BLOCK_SIZE,
    Served,
    engine_backend,
    make_engine,
    prompt,
    random_model,
)
from tests.gpu_check.items import SWAP, SWAP_LENGTHS
from tests.gpu_check.model_sizes import SIZE_8B, SIZE_DRY, Size
from tests.gpu_check.records import Row
from tests.gpu_check.rig import Rig
from tests.gpu_check.shapes import LINK
from tests.gpu_check.targets import NOTHING, rate, timed
from tests.gpu_check.timing import synchronize

_BLOCKS = 512
"""As many as the longest context takes: 4 GiB of an 8B model."""
_UNDER_WAY = 24
"""Copies that decoding always has beside it."""
_AT_ONCE = 8
"""Copies of one direction that are begun together, as those of one choice are."""
_TOKENS = 32


def run(rig: Rig) -> None:
    """Bandwidths first: they need no engine."""
    size = SIZE_DRY if rig.dry else SIZE_8B
    model = random_model(rig, size)
    block_size = 16 if rig.dry else BLOCK_SIZE
    swap = _Swap(rig, model, block_size, 4 if rig.dry else _BLOCKS)
    _bandwidth(rig, swap)
    room = 64 if rig.dry else 64 * 18 + _BLOCKS
    engine = make_engine(rig, model, num_gpu_blocks_override=room)
    _beside(rig, engine, swap, size)
    for item, length in zip(SWAP[3:], SWAP_LENGTHS, strict=True):
        _compare(rig, item, 40 if rig.dry else length, Served(engine), swap, size, block_size)


def _beside(rig: Rig, engine: Engine, swap: _Swap, size: Size) -> None:
    """A decode step of 64 choices, with and without copies. The floor is the one without."""
    batch, context = (2, 20) if rig.dry else (64, 1024)
    prompts = [prompt(size, context, seed) for seed in range(batch)]
    tokens = 4 if rig.dry else _TOKENS
    alone_s = Served(engine).decoding_s("alone", prompts, tokens)
    swapping = _Beside(engine, swap)
    begin = time.perf_counter()
    beside_s = swapping.decoding_s("beside", prompts, tokens)
    moved = swapping.blocks * swap.block_bytes / (time.perf_counter() - begin)
    swapping.drain()
    note = f"{moved / 1e9:.2g} GB/s meanwhile; floor: without copies"
    rig.recorder.add(timed(SWAP[2], beside_s, alone_s, NOTHING, dry=rig.dry, note=note))


def _compare(
    rig: Rig,
    item: str,
    length: int,
    served: Served,
    swap: _Swap,
    size: Size,
    block_size: int,
) -> None:
    """One context: how many times as long computing it again takes as writing and reading it."""
    blocks = -(-length // block_size)
    served.prefill_s(f"warm-up {item}", prompt(size, length, 1))
    compute_s = served.prefill_s(f"again {item}", prompt(size, length, 2))
    out_s, in_s = swap.out_s(blocks), swap.in_s(blocks)
    note = f"computing {compute_s * 1e3:.1f} ms; out {out_s * 1e3:.1f}, in {in_s * 1e3:.1f} ms"
    ratio = compute_s / (out_s + in_s)
    rig.recorder.add(Row(item, ratio, "x", note=note, higher_is_better=True))


def _bandwidth(rig: Rig, swap: _Swap) -> None:
    count = swap.count
    size = count * swap.block_bytes
    swap.out_s(count)  # the first touch of memory is no measure of what follows
    swap.in_s(count)
    for item, ceiling, seconds in (
        (SWAP[0], names.TO_HOST, min(swap.out_s(count) for _ in range(2))),
        (SWAP[1], names.FROM_HOST, min(swap.in_s(count) for _ in range(2))),
    ):
        known = rig.ceiling(ceiling)
        most = None if known is None else known / 1e9
        rig.recorder.add(rate(item, size / seconds / 1e9, "GB/s", most, LINK, dry=rig.dry))


class _Swap:
    """A pool of its own, host memory of as many blocks, and the engine's copier between them."""

    def __init__(self, rig: Rig, model: PagedModel, block_size: int, count: int) -> None:
        config = EngineConfig(block_size=block_size, kernel_backend=engine_backend(rig))
        kv_format = KVFormat.choose(config, model, rig.device)
        side = device_side.choose(config, model, kv_format, rig.device)
        pool = KVPool(
            model.spec,
            num_blocks=count,
            block_size=block_size,
            dtype=kv_format.dtype,
            device=rig.device,
        )
        self.block_bytes, self.count = pool.block_bytes, count
        store = InProcessStore(count, pool.block_bytes)
        self.copier = side.copier(pool, store, time.perf_counter)
        self.saves = [Save(i + 1, i, i.to_bytes(16, "big")) for i in range(count)]
        self.restores = [Restore((OWN_SLAB, s.slot), s.block, s.digest) for s in self.saves]

    def out_s(self, blocks: int) -> float:
        """Seconds until so many blocks are in host memory."""
        return self._seconds(self.saves[:blocks])

    def in_s(self, blocks: int) -> float:
        """Seconds until so many blocks are back."""
        return self._seconds(self.restores[:blocks])

    def _seconds(self, copies: Sequence[Save | Restore]) -> float:
        synchronize()
        begin, left = time.perf_counter(), len(copies)
        self.copier.start(copies)
        while left:
            self.copier.wait(0.01)
            ended = self.copier.ended()
            assert all(each.ok for each in ended)
            left -= len(ended)
        synchronize()
        return time.perf_counter() - begin


class _Beside(Served):
    """An engine between whose steps copies are always begun anew: half out, half in."""

    def __init__(self, engine: Engine, swap: _Swap) -> None:
        super().__init__(engine)
        self._swap = swap
        half = swap.count // 2
        self._waiting: deque[Sequence[Save | Restore]] = deque()
        for first in range(0, half, _AT_ONCE):
            self._waiting.append(swap.saves[first : min(first + _AT_ONCE, half)])
            self._waiting.append(swap.restores[half + first : half + first + _AT_ONCE])
        self._left = 0
        self.blocks = 0

    def step(self) -> int:
        """Also takes copies in that have ended, and keeps as many under way as before."""
        delivered = super().step()
        ended = len(self._swap.copier.ended())
        self.blocks += ended
        self._left -= ended
        while self._left < _UNDER_WAY:
            copies = self._waiting[0]
            self._waiting.rotate(-1)
            self._swap.copier.start(copies)
            self._left += len(copies)
        return delivered

    def drain(self) -> None:
        """Wait for what is under way."""
        while self._left:
            self._swap.copier.wait(0.01)
            self._left -= len(self._swap.copier.ended())
