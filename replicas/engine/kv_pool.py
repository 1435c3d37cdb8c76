"""The KV pool's memory and its layout, which differs by device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.fp8 import FP8, movable
from kernels.pool_layout import transposed_keys
from replicas.engine import large_pages
from replicas.models.kv_scales import KVScales
from replicas.models.spec import ModelSpec

RESERVED_BLOCKS = 1
"""Block 0 is zero, never written and never handed out."""


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers: layers x (K, V) x kv_heads x block_size x head_dim."""
    return spec.num_layers * 2 * spec.kv_heads * block_size * spec.head_dim * dtype.itemsize


class KVPool:
    """Blocks 0..num_blocks of K and V for all layers.

    CUDA: `[num_blocks + 1, layers, 2, kv_heads, block_size, head_dim]`, a block is one extent,
    so that moving one is one copy. CPU: `[layers, 2, num_blocks + 1, kv_heads, block_size,
    head_dim]`, a layer's blocks are contiguous, so that attention multiplies with them in
    place, and each block of keys is stored transposed. Unused slots are finite, as 0 x NaN
    would be NaN there.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        scales: KVScales | None = None,
    ) -> None:
        """`scales`, on `device`, are for an e4m3 pool, which needs them."""
        if (scales is not None) != (dtype == FP8):
            raise ValueError(f"scales are for an e4m3 pool, which needs them: this is {dtype}")
        self._scales = scales
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.block_bytes = block_bytes(spec, block_size, dtype)
        block = (spec.kv_heads, block_size, spec.head_dim)
        blocks = num_blocks + RESERVED_BLOCKS
        # Every page is touched now: a lazy pool would run out of memory in mid-stream.
        self._on_cpu = device == "cpu"
        self.layout = "layers,kv,heads,dim,slots" if self._on_cpu else "layers,kv,heads,slots,dim"
        """The order of a block's bytes on the host: that of the device, keys being transposed
        on CPU. Turning them would cost more than the copy, and tiers are shared on one node
        only, by replicas of one kind."""
        if self._on_cpu:
            self._by_layer = large_pages.zeros((spec.num_layers, 2, blocks, *block), dtype)
        else:
            memory = torch.empty((blocks, spec.num_layers, 2, *block), dtype=dtype, device=device)
            self._by_layer = memory.zero_().permute(1, 2, 0, 3, 4, 5)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(key blocks, value blocks), each [num_blocks + 1, kv_heads, block_size, head_dim]."""
        keys, values = self._by_layer[index]
        return (transposed_keys(keys) if self._on_cpu else keys), values

    @property
    def blocks(self) -> Tensor:
        """[num_blocks + 1, layers, 2, ...], contiguous where the pool is on a GPU."""
        return self._by_layer.movedim(2, 0)

    def scales(self, index: int) -> tuple[Tensor, Tensor] | None:
        """(k_scale, v_scale) of a layer, each [kv_heads] float32; None where it has none."""
        return None if self._scales is None else self._scales.layer(index)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) over all layers; all are read before any is written."""
        if not pairs:
            return
        device = self._by_layer.device
        sources, targets = torch.tensor(pairs, dtype=torch.int64, device=device).unbind(1)
        blocks = movable(self._by_layer)
        blocks[:, :, targets] = blocks[:, :, sources]

    def export(self, block: int, into: Tensor) -> None:
        """Copy a block out to `into`, uint8 [block_bytes] in host memory. Where that is pinned
        and the pool on a GPU, the copy is only queued on the current stream."""
        self._as_host_block(into).copy_(self._by_layer[:, :, block], non_blocking=True)

    def load(self, block: int, content: Tensor) -> None:
        """Fill a block with what `export` gave; queued where `export` would be."""
        self._by_layer[:, :, block].copy_(self._as_host_block(content), non_blocking=True)

    def _as_host_block(self, content: Tensor) -> Tensor:
        layers, parts, _, *block = self._by_layer.shape
        return content.view(self.dtype).view(layers, parts, *block)
