"""What the attention kernels are compiled for: head counts, widths, types and strides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

BLOCK_SIZES = (16, 32, 64, 128)
"""Slots of a block that the kernels accept."""

FP8 = torch.float8_e4m3fn
FIRST_FP8_ARCH = 89
"""Before it, no instruction converts e4m3 and Triton does not compile the type."""

MAX_HEAD_DIM = 256
MAX_GROUP = 64
"""Query heads of one KV head that a program takes; more are split over several."""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention. Strides count elements; the last dimension is contiguous."""

    num_heads: int
    kv_heads: int
    head_dim: int
    """Width of queries and keys, <= the pool's."""
    value_dim: int
    """Width of values and outputs, <= the pool's."""
    block_size: int
    query_dtype: torch.dtype
    pool_dtype: torch.dtype
    block_stride: int
    """From a block of the pool to the next: `layers * 2 * kv_heads * block_size * head_dim`."""
    head_stride: int
    slot_stride: int
    query_token_stride: int
    query_head_stride: int
    arch: int
    """Compute capability, such as 90."""

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not share {self.kv_heads} KV heads")
        for name, width in (("head_dim", self.head_dim), ("value_dim", self.value_dim)):
            if not 16 <= width <= MAX_HEAD_DIM or width % 8:
                raise ValueError(
                    f"{name} {width} is no multiple of 8 between 16 and {MAX_HEAD_DIM}"
                )
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size {self.block_size} is none of {BLOCK_SIZES}")
        if self.query_dtype not in _FLOATS:
            raise ValueError(f"query is {self.query_dtype}, not one of {_FLOATS}")
        if self.pool_dtype not in (self.query_dtype, FP8):
            raise ValueError(
                f"the pool is {self.pool_dtype}, neither {self.query_dtype} as the query nor {FP8}"
            )
        if self.pool_dtype == FP8 and self.arch < FIRST_FP8_ARCH:
            raise ValueError(
                f"an fp8 KV cache needs compute capability 8.9 or later, "
                f"not {self.arch // 10}.{self.arch % 10}: choose kv_cache_dtype auto"
            )

    @classmethod
    def of(cls, query: Tensor, key_blocks: Tensor, value_blocks: Tensor) -> AttentionShape:
        """`query` `[T, heads, head_dim]`, the blocks `[num_blocks, kv_heads, block_size, >=
        head_dim]` and `[..., value_dim]`, one layer's views of the pool: equal strides.

        Raises ValueError where the kernels cannot take them.
        """
        if query.dim() != 3 or key_blocks.dim() != 4 or value_blocks.dim() != 4:
            raise ValueError(
                "query is [T, heads, head_dim], key_blocks and value_blocks are "
                "[num_blocks, kv_heads, block_size, head_dim]"
            )
        if key_blocks.shape[:3] != value_blocks.shape[:3] or key_blocks.dtype != value_blocks.dtype:
            raise ValueError("key_blocks and value_blocks differ in shape or type")
        if key_blocks.stride() != value_blocks.stride():
            raise ValueError("key_blocks and value_blocks differ in their strides")
        if key_blocks.stride(3) != 1 or query.stride(2) != 1:
            raise ValueError("the last dimension of query and blocks is contiguous")
        if query.shape[2] > key_blocks.shape[3]:
            raise ValueError(
                f"query is {query.shape[2]} wide, more than key_blocks' {key_blocks.shape[3]}"
            )
        return cls(
            num_heads=query.shape[1],
            kv_heads=key_blocks.shape[1],
            head_dim=query.shape[2],
            value_dim=value_blocks.shape[3],
            block_size=key_blocks.shape[2],
            query_dtype=query.dtype,
            pool_dtype=key_blocks.dtype,
            block_stride=key_blocks.stride(0),
            head_stride=key_blocks.stride(1),
            slot_stride=key_blocks.stride(2),
            query_token_stride=query.stride(0),
            query_head_stride=query.stride(1),
            arch=device_arch(query.device),
        )

    @classmethod
    def of_model(
        cls,
        *,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        layers: int,
        query_dtype: torch.dtype,
        pool_dtype: torch.dtype,
        arch: int,
        value_dim: int | None = None,
    ) -> AttentionShape:
        """As `of` finds it for contiguous queries and a pool `[num_blocks, layers, 2, kv_heads,
        block_size, head_dim]`."""
        return cls(
            num_heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim or head_dim,
            block_size=block_size,
            query_dtype=query_dtype,
            pool_dtype=pool_dtype,
            block_stride=layers * 2 * kv_heads * block_size * head_dim,
            head_stride=block_size * head_dim,
            slot_stride=head_dim,
            query_token_stride=num_heads * head_dim,
            query_head_stride=head_dim,
            arch=arch,
        )

    @property
    def group(self) -> int:
        """Query heads of a KV head that one program takes."""
        return min(self.num_heads // self.kv_heads, MAX_GROUP)

    @property
    def head_programs(self) -> int:
        """Programs that share a work item or query tile among all query heads."""
        return self.kv_heads * -(-self.num_heads // (self.kv_heads * self.group))

    @property
    def constants(self) -> dict[str, int | bool]:
        """What the kernels that read the pool are compiled for."""
        return {
            "NUM_HEADS": self.num_heads,
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
            "DIM": triton.next_power_of_2(self.head_dim),
            "VDIM": triton.next_power_of_2(self.value_dim),
            "BLOCK_SIZE": self.block_size,
            "BLOCK_STRIDE": self.block_stride,
            "HEAD_STRIDE": self.head_stride,
            "SLOT_STRIDE": self.slot_stride,
            "QUERY_TOKEN_STRIDE": self.query_token_stride,
            "QUERY_HEAD_STRIDE": self.query_head_stride,
            "FP8_POOL": self.pool_dtype == FP8,
        }

    def check_scales(self, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
        """Raises ValueError unless both scales are `[kv_heads]` float32, or absent and the pool is
        not fp8: without them its values mean nothing."""
        if k_scale is None and v_scale is None and self.pool_dtype != FP8:
            return
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is None:
                raise ValueError(f"{name} is missing")
            if scale.shape != (self.kv_heads,) or scale.dtype != torch.float32:
                raise ValueError(f"{name} is [{self.kv_heads}] float32, one a KV head")


def device_arch(device: torch.device) -> int:
    """Compute capability of a device, 90 for 9.0; on CPU, where Triton interprets, 90 too."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
