"""The only chooser of kernels: torch's, on any device, or Triton's on a GPU."""

from __future__ import annotations

from importlib import util
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kernels import torch_attention
from kernels.attention_batch import AttentionBatch
from kernels.attention_params import AttentionParams
from kernels.block_moves import BlockMoves, TorchBlockMoves
from kernels.elementwise import Elementwise, TorchElementwise
from kernels.fp8 import FP8
from kernels.head_transform import HeadTransform

if TYPE_CHECKING:
    from kernels.gpu.attention_step import AttentionStep
    from kernels.gpu.sampling import TritonSampling

Backend = Literal["triton", "torch"]
KernelBackend = Literal["auto", "triton", "torch"]
"""What an operator may ask for."""

_FP8_CAPABILITY = (8, 9)
"""Of GPUs from which on Triton's kernels convert e4m3."""


class KernelBackendError(ValueError):
    """The kernels asked for cannot run here; the message says why, and what can."""


def backend(kernel_backend: KernelBackend, device: str) -> Backend:
    """Whose kernels run on `device` (`cpu`, `cuda` or `cuda:N`). `auto` takes Triton's wherever
    there is a GPU and Triton is installed, else torch's.

    Raises:
        KernelBackendError: `triton` without a GPU, or without Triton.
    """
    if kernel_backend == "torch":
        return "torch"
    obstacle = _obstacle(device)
    if obstacle is None:
        return "triton"
    if kernel_backend == "triton":
        raise KernelBackendError(
            f"kernel_backend 'triton' needs {obstacle}; allowed here: 'auto' or 'torch'"
        )
    return "torch"


def _obstacle(device: str) -> str | None:
    """What Triton's kernels lack."""
    if torch.device(device).type != "cuda":
        return f"an NVIDIA GPU, and this replica runs on {device!r}"
    if not torch.cuda.is_available():
        return "an NVIDIA GPU, and torch finds none"
    if util.find_spec("triton") is None:
        return "the package triton, which is not installed"
    return None


def check_fp8(chosen: Backend, device: str) -> None:
    """Raise KernelBackendError where the `chosen` kernels cannot use an e4m3 pool on `device`."""
    if chosen == "torch":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < _FP8_CAPABILITY:
        raise KernelBackendError(
            f"kv_cache_dtype 'fp8_e4m3' with Triton's kernels needs a GPU of compute capability "
            f"8.9, and this one has {major}.{minor}; allowed here: kv_cache_dtype 'bfloat16', or "
            f"kernel_backend 'torch'"
        )


def elementwise(chosen: Backend) -> Elementwise:
    """The element-wise ops of the `chosen` kernels. Triton's raise VariantError for what
    `kernels/variants.py` does not list."""
    if chosen == "torch":
        return TorchElementwise()
    from kernels.gpu.elementwise import TritonElementwise

    return TritonElementwise()


def block_moves(chosen: Backend) -> BlockMoves:
    """How the `chosen` kernels move whole blocks. Triton's raise VariantError for what
    `kernels/variants.py` does not list."""
    if chosen == "torch":
        return TorchBlockMoves()
    from kernels.gpu.block_moves import TritonBlockMoves

    return TritonBlockMoves()


def sampling(vocab_size: int, device: str) -> TritonSampling:
    """Who samples logits [R, vocab_size] on a GPU. With torch's kernels it is the engine's own
    sampler, on any device.

    Raises:
        ValueError: the kernels do not take so large a vocabulary.
        VariantError: `kernels/variants.py` does not list them.
    """
    from kernels.gpu.sampling import TritonSampling

    return TritonSampling(vocab_size, torch.device(device))


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    batch: AttentionBatch | AttentionStep,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    heads: HeadTransform | None = None,
) -> Tensor:
    """Write the step's keys and values into the pool, then attend causally over it: with torch
    for an `AttentionBatch`, with Triton for an `AttentionStep`.

    `query` `[T, heads, dim]`, `key` `[T, kv_heads, dim]`, `value` `[T, kv_heads, value_dim]`;
    the blocks are one layer's pool, `[num_blocks, kv_heads, block_size, head_dim]` with head_dim
    no less than either dim, of which unused slots hold anything finite. Query p sees keys
    p - window + 1 .. p. `sinks` `[heads]` are logits that join the softmax denominator.
    `k_scale` and `v_scale`, `[kv_heads]` float32, are what stored values are multiplied by: an
    e4m3 pool has both, no other has any. `heads` is done to query and key first. Returns
    `[T, heads, value_dim]` in the query's dtype. Not differentiable: call it under
    `torch.inference_mode()` or `no_grad()`.

    Raises:
        ValueError: an e4m3 pool without scales, or scales for another.
        VariantError: a GPU is asked for what `kernels/variants.py` does not list.
    """
    has_scales = [given is not None for given in (k_scale, v_scale)]
    if has_scales != [key_blocks.dtype == FP8] * 2:
        raise ValueError(
            f"k_scale and v_scale go with an e4m3 pool, both or none: given {has_scales} with "
            f"{key_blocks.dtype}"
        )
    params = AttentionParams(scale, window, soft_cap, sinks, k_scale, v_scale)
    if not isinstance(batch, AttentionBatch):
        return _with_triton(query, key, value, key_blocks, value_blocks, batch, params, heads)
    if heads is not None:
        query, key = heads.apply(query, key)
    return torch_attention.write_and_attend(
        query, key, value, key_blocks, value_blocks, batch, params
    )


def _with_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    step: AttentionStep,
    params: AttentionParams,
    heads: HeadTransform | None,
) -> Tensor:
    from kernels.gpu.attention import attend  # only here: a CPU needs no triton
    from kernels.gpu.kv_write import kv_write
    from kernels.variants import Layer, checks, require_layer

    heads = heads or HeadTransform()
    query, key, value = _packed(query), _packed(key), _packed(value)
    if checks(query.device):
        tile_tokens = step.sizes.tile_tokens
        require_layer(Layer.of(query, key, value, key_blocks, params, heads, tile_tokens))
    query = kv_write(
        query,
        key,
        value,
        key_blocks,
        value_blocks,
        step.slots,
        cos=heads.cos,
        sin=heads.sin,
        q_norm=heads.q_norm,
        k_norm=heads.k_norm,
        eps=heads.norm_eps,
        k_scale=params.k_scale,
        v_scale=params.v_scale,
    )
    return attend(
        query,
        key_blocks,
        value_blocks[..., : value.shape[2]],
        step,
        scale=params.scale,
        window=params.window,
        soft_cap=params.soft_cap,
        sinks=params.sinks,
        k_scale=params.k_scale,
        v_scale=params.v_scale,
    )


def _packed(heads: Tensor) -> Tensor:
    """`[T, heads, dim]` with each token's heads side by side, as kernels take them. Some models
    compute them head by head, and then torch calls a dimension of size 1 contiguous anyhow."""
    _, count, dim = heads.shape
    if heads.stride()[1:] != (dim, 1):
        return torch.empty(heads.shape, dtype=heads.dtype, device=heads.device).copy_(heads)
    if len(heads) == 1 and heads.stride(0) < count * dim:
        # A lone token has no next one, and torch may give it any stride. Kernels are compiled for
        # each: this is that of more tokens.
        return heads.as_strided(heads.shape, (count * dim, dim, 1))
    return heads
