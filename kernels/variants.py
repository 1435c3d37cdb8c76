"""Every kernel variant that the engine can ask for; dispatch refuses the others.

A variant is what is compiled apart. What differs in numbers alone is one: head counts, strides and
row widths of equal divisibility, block sizes on one side of the tile, groups that fill the rows of
a tile alike. Importing this needs Triton, and compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch
from torch import Tensor

from kernels.attention_params import AttentionParams
from kernels.fp8 import FP8
from kernels.gpu import (
    allow_only,
    attn_decode,
    attn_merge,
    attn_prefill,
    block_copy,
    block_gather,
    edit_scores,
    kv_write,
    rms_norm,
    sample,
    silu_mul,
)
from kernels.gpu.attention_shape import FIRST_FP8_ARCH, AttentionShape, device_arch
from kernels.gpu.launch import Launch
from kernels.head_transform import HeadTransform
from kernels.model_shapes import MODELS, HeadNorm, ModelShape

TARGETS = (80, 90, 100)
"""Compute capabilities that all variants are compiled for ahead of time; others compile what is
asked for when it is."""
BLOCK_SIZES = (16, 64)
"""One below the tile, and one that holds it."""
NORM_BLOCKS = tuple(1 << power for power in range(7, 15))
"""Widths of rows, rounded up to a power of two."""
VOCAB_SIZES = (128_000, 128_002, 128_001)
"""Of each divisibility that matters to rows of float32."""
_DIVISIBILITY = 16
"""Elements up to which Triton makes use of a divisor: 16 bytes of the smallest type."""
_COUNTS = frozenset({"NUM_HEADS", "KV_HEADS", "HEADS"})


class VariantError(ValueError):
    """A kernel was asked for that is not listed; the message says what about it is not."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What one attention layer asks for."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    block_size: int
    dtype: torch.dtype
    pool_dtype: torch.dtype
    arch: int
    """Compute capability, such as 90."""
    rot_dim: int = 0
    rope_dtype: torch.dtype | None = None
    norm_dtype: torch.dtype | None = None
    sinks_dtype: torch.dtype | None = None
    windowed: bool = False
    capped: bool = False
    token_strides: tuple[int, int, int] | None = None
    """From a token to the next in query, key and value; None where each is contiguous."""
    pool_strides: tuple[int, int] | None = None
    """From a block to the next and from a head to the next; None where a pool has one layer."""
    tile_tokens: int | None = None
    """New tokens of a query tile; None for those of the table of tiles."""

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_blocks: Tensor,
        params: AttentionParams,
        heads: HeadTransform,
        tile_tokens: int,
    ) -> Layer:
        """Of what `dispatch.paged_attention` gives the kernels: `query` `[T, heads, dim]`, `key`
        `[T, kv_heads, dim]` and `value` `[T, kv_heads, value_dim]`, heads packed, `key_blocks`
        `[num_blocks, kv_heads, block_size, pool_dim]`."""
        return cls(
            heads=query.shape[1],
            kv_heads=value.shape[1],
            head_dim=query.shape[2],
            value_dim=value.shape[2],
            block_size=key_blocks.shape[2],
            dtype=query.dtype,
            pool_dtype=key_blocks.dtype,
            arch=device_arch(query.device),
            rot_dim=0 if heads.cos is None else heads.cos.shape[-1],
            rope_dtype=None if heads.cos is None else heads.cos.dtype,
            norm_dtype=None if heads.q_norm is None else heads.q_norm.dtype,
            sinks_dtype=None if params.sinks is None else params.sinks.dtype,
            windowed=params.window is not None,
            capped=params.soft_cap is not None,
            token_strides=(query.stride(0), key.stride(0), value.stride(0)),
            pool_strides=(key_blocks.stride(0), key_blocks.stride(1)),
            tile_tokens=tile_tokens,
        )

    def launches(self) -> tuple[Launch, ...]:
        """`kv_write`, `attn_decode`, `attn_merge` and `attn_prefill`.

        Raises:
            VariantError: the kernels cannot be made for it, on this device or on any.
        """
        width = max(self.head_dim, self.value_dim)
        head_stride = self.block_size * width
        pool_strides = self.pool_strides or (2 * self.kv_heads * head_stride, head_stride)
        strides = dict(zip(("block_stride", "head_stride"), pool_strides, strict=True))
        packed = (
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.kv_heads * self.value_dim,
        )
        token_strides = self.token_strides or packed
        rewritten = self.rope_dtype is not None or self.norm_dtype is not None
        try:
            shape = AttentionShape(
                num_heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                value_dim=self.value_dim,
                block_size=self.block_size,
                query_dtype=self.dtype,
                pool_dtype=self.pool_dtype,
                slot_stride=width,
                query_token_stride=packed[0] if rewritten else token_strides[0],
                query_head_stride=self.head_dim,
                arch=self.arch,
                **strides,
            )
        except ValueError as error:
            raise VariantError(f"attention is not listed: {error}") from error
        write = kv_write.launch(
            dtype=self.dtype,
            pool_dtype=self.pool_dtype,
            rope_dtype=self.rope_dtype,
            norm_dtype=self.norm_dtype,
            heads=self.heads,
            kv_heads=self.kv_heads,
            dim=self.head_dim,
            value_dim=self.value_dim,
            rot_dim=self.rot_dim,
            block_size=self.block_size,
            pool_dim=width,
            token_strides=token_strides,
            **strides,
        )
        merge = attn_merge.launch(
            num_heads=self.heads,
            value_dim=self.value_dim,
            output_dtype=self.dtype,
            sinks_dtype=self.sinks_dtype,
        )
        prefill = attn_prefill.launch(
            shape,
            tile_tokens=self.tile_tokens,
            windowed=self.windowed,
            capped=self.capped,
            sinks_dtype=self.sinks_dtype,
        )
        return write, attn_decode.launch(shape, capped=self.capped), merge, prefill


@cache
def require_layer(layer: Layer) -> None:
    """Raise VariantError unless all that `layer` asks for is listed."""
    for launch in layer.launches():
        require(launch, layer.arch)


def require_all(launches: Iterable[Launch], device: torch.device) -> None:
    """`require` each for a GPU; elsewhere, in Triton's interpreter, any will do.

    It takes microseconds a launch: whoever asks keeps in mind what has been allowed.
    """
    if checks(device):
        for launch in launches:
            require(launch, device_arch(device))


def checks(device: torch.device) -> bool:
    """Whether kernels on `device` must be listed: where they are compiled."""
    return device.type == "cuda"


def require(launch: Launch, arch: int) -> None:
    """Raise VariantError unless `launch` is listed for compute capability `arch`."""
    listed = _by_identity(arch)
    if identity(launch) in listed:
        return
    peers = [_fields(other) for other in listed.values() if other.op == launch.op]
    if not peers:
        raise VariantError(f"{launch.op} is no kernel that is listed")
    asked = _fields(launch)
    unlike = ([name for name in asked if peer.get(name) != asked[name]] for peer in peers)
    named = {name: launch.constants.get(name, asked[name]) for name in min(unlike, key=len)}
    differing = ", ".join(f"{name}={value}" for name, value in named.items())
    raise VariantError(
        f"{launch.op} is not listed with {differing}: add the model's shape to "
        f"kernels/model_shapes.py and run `make check-kernels`, or choose kernel_backend 'torch'"
    )


def identity(launch: Launch) -> str:
    """Equal where the same code is compiled, up to the numbers in it; readable and stable."""
    fields = ",".join(f"{name}={value}" for name, value in sorted(_fields(launch).items()))
    return f"{launch.op}[{fields}]"


def variants(arch: int) -> tuple[Launch, ...]:
    """Those listed for compute capability `arch`, each once, always in the same order."""
    return tuple(_by_identity(arch).values())


@cache
def _by_identity(arch: int) -> dict[str, Launch]:
    found: dict[str, Launch] = {}
    for launch in (*_attention(arch), *_elementwise(), *_copies(), *_sampling()):
        found.setdefault(identity(launch), launch)
    return found


def _attention(arch: int) -> Iterator[Launch]:
    pools = (torch.bfloat16, FP8) if arch >= FIRST_FP8_ARCH else (torch.bfloat16,)
    for model in MODELS:
        for block_size in BLOCK_SIZES:
            for pool_dtype in pools:
                for windowed in model.windows:
                    for layer in _layers(model, block_size, pool_dtype, arch, windowed=windowed):
                        yield from layer.launches()


def _layers(
    model: ModelShape, block_size: int, pool_dtype: torch.dtype, arch: int, *, windowed: bool
) -> Iterator[Layer]:
    """As our modules call attention, and as the model's own do where replacing was declined:
    heads come normed and rotated then."""
    bfloat16 = torch.bfloat16
    norms = {HeadNorm.NONE: None, HeadNorm.MODEL: bfloat16, HeadNorm.FLOAT32: torch.float32}
    for ours in (True, False):
        rotated = ours and model.rot_dim > 0
        yield Layer(
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            value_dim=model.value_dim or model.head_dim,
            block_size=block_size,
            dtype=bfloat16,
            pool_dtype=pool_dtype,
            arch=arch,
            rot_dim=model.rot_dim if rotated else 0,
            rope_dtype=bfloat16 if rotated else None,
            norm_dtype=norms[model.head_norm] if ours else None,
            sinks_dtype=bfloat16 if model.sinks else None,
            windowed=windowed,
            capped=model.capped,
        )


def _elementwise() -> Iterator[Launch]:
    bfloat16, float32 = torch.bfloat16, torch.float32
    yield silu_mul.launch(dtype=bfloat16, width=4096)
    for block in NORM_BLOCKS:
        for width in (block, block - _DIVISIBILITY):  # the latter needs masks
            for residual in (None, width):
                for weight, rounded in ((bfloat16, True), (bfloat16, False), (float32, False)):
                    yield rms_norm.launch(
                        dtype=bfloat16,
                        weight_dtype=weight,
                        width=width,
                        x_stride=width,
                        residual_stride=residual,
                        rounded=rounded,
                    )


def _copies() -> Iterator[Launch]:
    words = 1 << 20
    yield block_gather.launch(words=words, scatter=False)
    yield block_gather.launch(words=words, scatter=True)
    pairs = 1
    while pairs <= block_copy.PAIRS:
        yield block_copy.launch(words=words, pairs=pairs)
        pairs *= 2


def _sampling() -> Iterator[Launch]:
    for vocab_size in VOCAB_SIZES:
        yield allow_only.launch(vocab_size=vocab_size)
        yield edit_scores.launch(vocab_size=vocab_size)
        yield from sample.launches(vocab_size)


def _fields(launch: Launch) -> dict[str, Any]:
    """Types, constants as far as they change code, warps and stages."""
    constants = {name: _essence(launch, name) for name in launch.constants}
    warps = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return dict(launch.types) | constants | warps


def _essence(launch: Launch, name: str) -> Any:
    """What of a constant changes the code."""
    value = launch.constants[name]
    if name == "WIDTH" and value == launch.constants["BLOCK"]:
        return "full"
    if name in ("GROUP", "TILE_TOKENS"):
        return _filling(launch.constants)
    if name == "VOCAB_STRIDE":
        return gcd(value, 4)
    if "STRIDE" in name or name in ("WIDTH", "POOL_DIM"):
        return gcd(value, _DIVISIBILITY)
    if name in _COUNTS:
        return min(value, 1)
    if name == "BLOCK_SIZE":
        tile = launch.constants["TILE"] if launch.op.startswith("attn") else 1
        return "below the tile" if value < tile else "a tile or more"
    return value


def _filling(constants: Mapping[str, Any]) -> str:
    """How the heads that share a KV head lie in the rows of a tile: rows that are left over are
    masked, and a row is split into token and head by a division."""
    group = constants["GROUP"]
    if constants.get("TILE_TOKENS", 1) * group < constants["ROWS"]:
        return "some rows"
    return "a head" if group == 1 else "all rows"
