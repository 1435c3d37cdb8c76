"""Norms, gates, writes of KV, copies of blocks and sampling, beside torch's own operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.gpu.block_copy import PAIRS, block_copy
from kernels.gpu.block_gather import block_gather, block_scatter
from kernels.gpu.kv_write import kv_write
from kernels.gpu.rms_norm import rms_norm
from kernels.gpu.silu_mul import silu_mul
from tests.gpu_check import rig as names
from tests.gpu_check import shapes
from tests.gpu_check.peer import report_peer
from tests.gpu_check.rig import Rig
from tests.gpu_check.sample_problem import bench_calls
from tests.gpu_check.targets import timed
from tests.gpu_check.timing import Call, pools_for, replayed

_EPS = 1e-5
_TARGETS = shapes.elementwise_targets()


def run(rig: Rig) -> None:
    """A row a kernel and size."""
    for part in PARTS:
        part(rig)


def _report(
    rig: Rig,
    item: str,
    bytes_moved: float,
    calls: Sequence[Call],
    peer: tuple[str, Sequence[Call]] | None,
) -> None:
    ours = replayed(rig, calls)
    floor_s = rig.floor_s(names.COPY, bytes_moved)
    target = _TARGETS[item]
    rig.recorder.add(timed(item, ours.median_s, floor_s, target, dry=rig.dry, note=ours.spread))
    if peer is not None:
        name, theirs = peer
        report_peer(rig, item, name, lambda: replayed(rig, theirs).median_s, ours.median_s)


def _norm(rig: Rig, tokens: int) -> None:
    item = f"rms_norm + residual T={tokens}"
    tokens = 4 if rig.small else tokens
    width = shapes.HIDDEN_DRY if rig.dry else shapes.HIDDEN_8B
    moved = 4.0 * tokens * width * 2
    pairs = [
        (_drawn(rig, tokens, width), _drawn(rig, tokens, width))
        for _ in range(pools_for(rig, moved))
    ]
    weight = _drawn(rig, width)

    def ours(x: Tensor, residual: Tensor) -> object:
        return rms_norm(x, weight, _EPS, residual=residual, rounded=True)

    def theirs(x: Tensor, residual: Tensor) -> object:
        total = x + residual
        return F.rms_norm(total, weight.shape, weight, _EPS), total

    _report(rig, item, moved, _over(ours, pairs), ("torch add, rms_norm", _over(theirs, pairs)))


def _silu(rig: Rig, tokens: int) -> None:
    item = f"silu_mul T={tokens}"
    tokens = 4 if rig.small else tokens
    width = shapes.INTERMEDIATE_DRY if rig.dry else shapes.INTERMEDIATE_8B
    moved = 3.0 * tokens * width * 2
    inputs = [(_drawn(rig, tokens, 2 * width),) for _ in range(pools_for(rig, moved))]

    def theirs(gate_up: Tensor) -> object:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    _report(rig, item, moved, _over(silu_mul, inputs), ("torch silu, mul", _over(theirs, inputs)))


def _write(rig: Rig, tokens: int) -> None:
    item = f"kv_write with rope T={tokens}"
    heads = shapes.HEADS_DRY if rig.dry else shapes.HEADS_8B
    size = shapes.BLOCK_SIZE_DRY if rig.dry else shapes.BLOCK_SIZE
    tokens = min(tokens, 5) if rig.small else tokens
    # Queries are read and written, keys and values too; angles are small.
    moved = 2.0 * tokens * (heads.query + 2 * heads.kv) * heads.dim * 2
    layers = 1 if rig.dry else shapes.LAYERS_8B
    blocks = -(-tokens // size) + 1
    pool = _drawn(rig, blocks, layers, 2, heads.kv, size, heads.dim)
    slots = torch.arange(size, size + tokens, device=rig.device)
    angles = torch.rand(tokens, heads.dim, device=rig.device)
    cos, sin = angles.cos().to(rig.dtype), angles.sin().to(rig.dtype)

    def call(layer: int, packed: Tensor) -> object:
        query, key, value = packed.split((heads.query, heads.kv, heads.kv), 1)
        keys, values = pool[:, layer, 0], pool[:, layer, 1]
        return kv_write(query, key, value, keys, values, slots, cos=cos, sin=sin)

    width = heads.query + 2 * heads.kv
    inputs = [
        (layer, _drawn(rig, tokens, width, heads.dim)) for layer in range(pools_for(rig, moved))
    ]
    _report(rig, item, moved, _over(call, inputs), None)


def _blocks(rig: Rig) -> None:
    """Of an 8B model's blocks, 8 MiB each. Pools are larger than any cache."""
    layers, heads = (2, shapes.HEADS_DRY) if rig.dry else (shapes.LAYERS_8B, shapes.HEADS_8B)
    size = shapes.BLOCK_SIZE_DRY if rig.dry else shapes.BLOCK_SIZE
    count = 2 if rig.small else PAIRS
    pool = _drawn(rig, 3 * count, layers, 2, heads.kv, size, heads.dim)
    moved = 2.0 * count * pool[0].nbytes
    order = torch.randperm(3 * count, generator=torch.Generator().manual_seed(2)).to(rig.device)
    parts = order.chunk(3)
    staging = [torch.empty_like(pool[:count]) for _ in parts]
    gathers = [
        lambda i=i, s=s: block_gather(pool, i, s) for i, s in zip(parts, staging, strict=True)
    ]
    scatters = [
        lambda i=i, s=s: block_scatter(s, i, pool) for i, s in zip(parts, staging, strict=True)
    ]
    selects = [
        lambda i=i, s=s: torch.index_select(pool, 0, i, out=s)
        for i, s in zip(parts, staging, strict=True)
    ]
    puts = [lambda i=i, s=s: pool.index_copy_(0, i, s) for i, s in zip(parts, staging, strict=True)]
    mib = shapes.GATHER_MIB
    _report(rig, f"block_gather {mib} MiB", moved, gathers, ("torch index_select", selects))
    _report(rig, f"block_scatter {mib} MiB", moved, scatters, ("torch index_copy_", puts))
    pairs = [torch.stack((parts[i], parts[i - 1]), 1).contiguous() for i in range(3)]
    copies = [lambda p=p: block_copy(pool, p) for p in pairs]
    _report(rig, f"block_copy {mib} MiB", moved, copies, None)


def _sample(rig: Rig) -> None:
    """The floor is one pass over float32 logits."""
    rows = 2 if rig.small else shapes.SAMPLE_ROWS
    vocabulary = 400 if rig.dry else shapes.SAMPLE_VOCAB
    moved = 4.0 * rows * vocabulary
    logits = [
        3 * torch.randn(rows, vocabulary, device=rig.device, generator=rig.seed(f"logits {i}"))
        for i in range(pools_for(rig, moved))
    ]
    probabilities = [(each.softmax(-1),) for each in logits]
    # torch.multinomial waits for the device, which no graph can hold; this is what it computes.
    drawing = _over(lambda p: (p / torch.empty_like(p).exponential_()).argmax(-1), probabilities)
    choosing = _over(lambda each: each.argmax(-1), [(each,) for each in logits])
    peers = {
        "greedy": ("torch argmax", choosing),
        "temperature": ("torch exponential race", drawing),
    }
    for kind, calls in bench_calls(rig, logits).items():
        _report(rig, f"sample B64 V=128k {kind}", moved, calls, peers.get(kind))


def _over(call: Callable[..., object], inputs: Sequence[tuple[object, ...]]) -> list[Call]:
    """One call without arguments for each input."""
    return [lambda arguments=arguments: call(*arguments) for arguments in inputs]


def _drawn(rig: Rig, *shape: int) -> Tensor:
    return torch.empty(shape, device=rig.device, dtype=rig.dtype).normal_()


PARTS: tuple[Callable[[Rig], None], ...] = (
    *(partial(_norm, tokens=tokens) for tokens in shapes.NORM_TOKENS),
    *(partial(_silu, tokens=tokens) for tokens in shapes.NORM_TOKENS),
    *(partial(_write, tokens=tokens) for tokens in shapes.KV_WRITE_TOKENS),
    _blocks,
    _sample,
)
"""They need not follow each other."""
