"""Copies bit-exact, norms, gates and writes of KV against float64; the cheapest checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.gpu.block_copy import block_copy
from kernels.gpu.block_gather import block_gather, block_scatter
from kernels.gpu.kv_write import kv_write
from kernels.gpu.rms_norm import rms_norm
from kernels.gpu.silu_mul import silu_mul
from tests.gpu_check import oracle
from tests.gpu_check.accuracy import Worst, dtypes, poisoned
from tests.gpu_check.paged import FP8
from tests.gpu_check.rig import Rig
from tests.gpu_check.targets import exact

_EPS = 1e-5
_EXACT = ((0, False),)
_TRANSFORMS = (*_EXACT, (64, False), (64, True), (32, True))
"""How many dimensions turn, and whether heads are normed."""


def run(rig: Rig) -> None:
    """Each check is a row."""
    for part in PARTS:
        part(rig)


def _copies(rig: Rig) -> None:
    """Block sizes in bytes that are and are not a multiple of what a program moves."""
    copied = moved = total = 0
    shapes = ((4, 2, 1, 16, 24),) if rig.dry else ((4, 2, 1, 16, 24), (32, 2, 8, 64, 128))
    count = 4 if rig.small else 40
    for layers in shapes:
        pool = _bits(rig, (count, *layers))
        before = pool.clone()
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(rig.device)
        half = min(count // 2, 16)
        pairs = torch.stack((order[:half], order[half : 2 * half]), 1).contiguous()
        block_copy(pool, pairs)
        expected = before.clone()
        expected[pairs[:, 1]] = before[pairs[:, 0]]
        copied += int((pool != expected).sum())
        staging = _bits(rig, (half + 1, *layers))
        untouched = staging[half].clone()
        block_gather(before, order[:half], staging)
        moved += int((staging[:half] != before[order[:half]]).sum())
        moved += int((staging[half] != untouched).sum())
        target = torch.full_like(before, -1)
        block_scatter(staging, order[:half], target)
        kept = torch.full_like(before, -1)
        kept[order[:half]] = before[order[:half]]
        moved += int((target != kept).sum())
        total += pool.numel()
    rig.recorder.add(exact("block_copy bit-exact", copied, total))
    rig.recorder.add(exact("block_gather, block_scatter bit-exact", moved, 3 * total))


def _bits(rig: Rig, shape: tuple[int, ...]) -> Tensor:
    """Any bits, NaN among them when they are taken for floats."""
    generator = rig.seed("bits")
    shape = (*shape[:-1], shape[-1] // 4)
    return torch.randint(-(2**61), 2**61, shape, device=rig.device, generator=generator)


def _silu(rig: Rig) -> None:
    worst = Worst()
    for dtype in dtypes(rig):
        for most, width in ((3, 40),) if rig.dry else ((1, 14336), (77, 8960), (2048, 14336)):
            tokens = min(most, 3) if rig.small else most
            gate_up = _drawn(rig, dtype, tokens, 2 * width)
            found = poisoned(lambda x=gate_up: silu_mul(x))
            worst.see(found, oracle.silu_mul(gate_up), dtype, f"{dtype} [{tokens}, {width}]")
    rig.recorder.add(worst.row("silu_mul right"))


def _norms(rig: Rig) -> None:
    worst = Worst()
    for dtype, tokens, width in _norm_cases(rig):
        x, residual = _drawn(rig, dtype, tokens, width), _drawn(rig, dtype, tokens, width) * 3
        weight = _drawn(rig, dtype, width) * 0.1 + 1
        added = x + residual
        for rounded in (False, True):
            name = f"{dtype} [{tokens}, {width}] rounded={rounded}"
            alone = poisoned(lambda r=rounded, x=x, w=weight: rms_norm(x, w, _EPS, rounded=r))
            worst.see(alone, oracle.rms_norm(x, weight, _EPS), dtype, name)
            normed, total = poisoned(
                lambda r=rounded, x=x, w=weight, o=residual: rms_norm(
                    x, w, _EPS, residual=o, rounded=r
                )
            )
            worst.see(normed, oracle.rms_norm(added, weight, _EPS), dtype, name)
            worst.see(total, added.double(), dtype, name)
    rig.recorder.add(worst.row("rms_norm + residual right"))


def _norm_cases(rig: Rig) -> Iterator[tuple[torch.dtype, int, int]]:
    for dtype in dtypes(rig):
        for tokens, width in ((3, 40),) if rig.dry else ((1, 4096), (77, 2880), (2048, 4096)):
            yield dtype, min(tokens, 3) if rig.small else tokens, width


def _writes(rig: Rig, *, fp8: bool) -> None:
    worst = Worst()
    for dtype in dtypes(rig):
        # The interpreter converts to fp8 wrongly where it rounds up to a power of two: there,
        # only what is exact in fp8 is written.
        for rotated, normed in _EXACT if rig.dry and fp8 else _TRANSFORMS:
            case = _Write(rig, dtype, rotated=rotated, normed=normed, fp8=fp8)
            case.check(worst, f"{dtype} rotated={rotated} normed={normed}")
    rig.recorder.add(worst.row("kv_write fp8 right" if fp8 else "kv_write right"))


class _Write:
    """Tokens in scattered slots of a strided pool; some are not to be written."""

    def __init__(
        self, rig: Rig, dtype: torch.dtype, *, rotated: int, normed: bool, fp8: bool
    ) -> None:
        heads, kv_heads, dim, size = (2, 1, 64, 16) if rig.dry else (32, 8, 128, 64)
        tokens = 5 if rig.small else 300
        self.dtype, self.size, self.fp8 = dtype, size, fp8
        packed = _drawn(rig, dtype, tokens, (heads + 2 * kv_heads), dim)
        if rig.dry and fp8:
            packed = packed.float().to(FP8).to(dtype)
        self.query, self.key, self.value = packed.split((heads, kv_heads, kv_heads), 1)
        blocks = 2 + 2 * tokens // size
        shape = (blocks, 3, 2, kv_heads, size, dim)
        self.pool = torch.full(shape, 3.0, device=rig.device).to(FP8 if fp8 else dtype)
        order = torch.randperm((blocks - 1) * size, generator=torch.Generator().manual_seed(1))
        self.slots = (order[:tokens] + size).to(rig.device)
        self.slots[1] = -1
        angles = _drawn(rig, torch.float32, tokens, rotated // 2).repeat(1, 2) * 9
        self.cos, self.sin = (angles.cos(), angles.sin()) if rotated else (None, None)
        self.q_norm = _drawn(rig, dtype, dim) * 0.1 + 1 if normed else None
        self.k_norm = _drawn(rig, dtype, dim) * 0.1 + 1 if normed else None
        per_head = torch.arange(1, kv_heads + 1, device=rig.device, dtype=torch.float32)
        first = (0.5, 0.25) if rig.dry else (0.011, 0.017)
        self.k_scale, self.v_scale = (f * per_head for f in first) if fp8 else (None, None)

    def check(self, worst: Worst, name: str) -> None:
        before = self.pool.clone()
        layer = self.pool[:, 1]
        query = poisoned(
            lambda: kv_write(
                self.query,
                self.key,
                self.value,
                layer[:, 0],
                layer[:, 1],
                self.slots,
                cos=self.cos,
                sin=self.sin,
                q_norm=self.q_norm,
                k_norm=self.k_norm,
                eps=_EPS,
                k_scale=self.k_scale,
                v_scale=self.v_scale,
            )
        )
        worst.see(query, self._turned(self.query, self.q_norm), self.dtype, name)
        written = self.slots[self.slots >= 0]
        block, offset = written // self.size, written % self.size
        parts = (
            (0, self._turned(self.key, self.k_norm), self.k_scale),
            (1, self.value.double(), self.v_scale),
        )
        for part, expected, scale in parts:
            found = layer[:, part].float()[block, :, offset].double()
            wanted = expected[self.slots >= 0]
            if scale is not None:
                wanted = _quantised(wanted, scale)
            worst.see(found, wanted, self.dtype, f"{name} part {part}")
        # As bytes: not every torch indexes fp8 on a GPU.
        old, new = before.view(torch.uint8), self.pool.view(torch.uint8)
        old[block, 1, :, :, offset] = new[block, 1, :, :, offset]
        same = torch.equal(old, new)
        worst.demand(same, f"{name}: other slots were written")

    def _turned(self, x: Tensor, norm: Tensor | None) -> Tensor:
        wide = x.double() if norm is None else oracle.rms_norm(x, norm, _EPS)
        return wide if self.cos is None else oracle.rotate(wide, self.cos, self.sin)


def _quantised(x: Tensor, scale: Tensor) -> Tensor:
    """What an fp8 pool holds for heads [T, kv_heads, D]."""
    return (x / scale.double()[:, None]).clamp(-448, 448).float().to(FP8).double()


def _repeats(rig: Rig) -> None:
    """Three runs of each op on the same input."""
    dtype = rig.dtype
    x, weight = _drawn(rig, dtype, 4, 96), _drawn(rig, dtype, 96)
    calls = (
        lambda: silu_mul(x),
        lambda: rms_norm(x, weight, _EPS, rounded=False),
        lambda: rms_norm(x, weight, _EPS, residual=x, rounded=True)[0],
    )
    wrong = 0
    for call in calls:
        first = poisoned(call)
        wrong += sum(not torch.equal(first, poisoned(call)) for _ in range(2))
    rig.recorder.add(exact("elementwise repeats bit-equal", wrong, 2 * len(calls)))


def _drawn(rig: Rig, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=rig.device, generator=rig.seed(f"{shape}")).to(dtype)


PARTS: tuple[Callable[[Rig], None], ...] = (
    _copies,
    _silu,
    _norms,
    partial(_writes, fp8=False),
    partial(_writes, fp8=True),
    _repeats,
)
"""They need not follow each other."""
