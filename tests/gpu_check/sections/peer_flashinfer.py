"""flashinfer over our own pool, in place. It builds its kernels when first called, with nvcc."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.gpu_check.paged import PagedProblem
from tests.gpu_check.peer_bench import beside_ours, need
from tests.gpu_check.rig import Rig

_WORKSPACE_BYTES = 2**29


def run(rig: Rig) -> None:
    need("flashinfer")
    # Groups of four heads are what its tensor-core kernel is for; prefill is built from the same
    # source, so that nvcc is waited for once.
    beside_ours(rig, "flashinfer", _decode_calls, _prefill_calls)


def _decode_calls(problem: PagedProblem) -> list[Callable[[], Tensor]]:
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(problem), "HND", use_tensor_cores=True, backend="fa2"
    )
    wrapper.plan(
        *_tables(problem),
        problem.heads.query,
        problem.heads.kv,
        problem.heads.dim,
        problem.block_size,
        q_data_type=problem.dtype,
        kv_data_type=problem.kv_dtype,
        sm_scale=problem.scale,
    )
    return list(_runs(problem, wrapper))


def _prefill_calls(problem: PagedProblem) -> list[Callable[[], Tensor]]:
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        _workspace(problem), "HND", backend="fa2"
    )
    lengths = itertools.accumulate((length for _, length in problem.spans), initial=0)
    wrapper.plan(
        _ints(problem, lengths),
        *_tables(problem),
        problem.heads.query,
        problem.heads.kv,
        problem.heads.dim,
        problem.block_size,
        causal=True,
        q_data_type=problem.dtype,
        kv_data_type=problem.kv_dtype,
        sm_scale=problem.scale,
    )
    return list(_runs(problem, wrapper))


def _runs(problem: PagedProblem, wrapper: Any) -> Iterator[Callable[[], Tensor]]:
    for layer in range(problem.turns):
        blocks = (problem.key_blocks(layer), problem.value_blocks(layer))
        yield lambda layer=layer, blocks=blocks: wrapper.run(problem.queries[layer], blocks)


def _tables(problem: PagedProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Where each row's blocks begin among all, the blocks, tokens in each row's last block."""
    counts = itertools.accumulate((len(s.blocks) for s in problem.segments), initial=0)
    blocks = itertools.chain.from_iterable(s.blocks for s in problem.segments)
    size = problem.block_size
    last = ((start + length - 1) % size + 1 for start, length in problem.spans)
    return _ints(problem, counts), _ints(problem, blocks), _ints(problem, last)


def _ints(problem: PagedProblem, values: Iterator[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=problem.device)


def _workspace(problem: PagedProblem) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=problem.device)
