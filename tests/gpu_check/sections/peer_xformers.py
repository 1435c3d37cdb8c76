"""xformers' triton_splitk, which decodes over padded contiguous keys and values."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.gpu_check.paged import PagedProblem
from tests.gpu_check.peer_bench import beside_ours, need
from tests.gpu_check.rig import Rig


def run(rig: Rig) -> None:
    need("xformers")
    beside_ours(rig, "xformers triton_splitk", _calls, None)


def _calls(problem: PagedProblem) -> list[Callable[[], Tensor]]:
    from xformers.ops import fmha

    batch, (start, _) = len(problem.spans), problem.spans[0]
    heads = problem.heads
    group = heads.query // heads.kv
    mask = fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[1] * batch, kv_seqlen=[start + 1] * batch, kv_padding=start + 1
    )
    calls = []
    for layer in range(problem.turns):
        query = problem.queries[layer].view(1, batch, heads.kv, group, heads.dim)
        keys, values = _padded(problem, layer, group)

        def call(q: Tensor = query, k: Tensor = keys, v: Tensor = values) -> Tensor:
            return fmha.memory_efficient_attention_forward(
                q, k, v, attn_bias=mask, scale=problem.scale, op=fmha.triton_splitk.FwOp
            )

        calls.append(call)
    return calls


def _padded(problem: PagedProblem, layer: int, group: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[1, B * S, Hkv, G, D]`; the group's heads share memory."""
    import torch

    rows = [problem.contiguous(layer, row) for row in range(len(problem.spans))]
    keys, values = (
        torch.cat(part)[None, :, :, None].expand(-1, -1, -1, group, -1)
        for part in zip(*rows, strict=True)
    )
    return keys, values
