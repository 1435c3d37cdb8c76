"""Checkpoints with KV scales, and what their logits ideally are over an fp8 pool."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from replicas.models.hf_adapter import ATTENTION, AttentionCall, PagedModel, run
from replicas.models.loader import load
from tests.replicas.engine.driver import Answer

Scale = float | Sequence[float]


def scaled_copy(
    source: Path, folder: Path, *, gain: float = 1.0, extra: Mapping[str, Scale] | None = None
) -> Path:
    """A copy of a Llama's checkpoint whose keys and values are `gain` times as large; as queries
    and outputs make up for it, it computes the same. `extra` tensors are added by name."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name] = tensors[name] * gain
        if name.endswith(("q_proj.weight", "o_proj.weight")):
            tensors[name] = tensors[name] / gain
    for name, scale in (extra or {}).items():
        tensors[name] = torch.tensor(scale)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def scales_of_layers(k_scale: Scale, v_scale: Scale, layers: int = 2) -> dict[str, Scale]:
    """The tensors in which compressed-tensors keeps them."""
    return {
        f"model.layers.{layer}.self_attn.{name}": scale
        for layer in range(layers)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    }


@dataclass(frozen=True, slots=True)
class Fp8Model:
    """One checkpoint: as the engine runs it, and as transformers' modules do with keys and values
    that were rounded to e4m3 and back."""

    paged: PagedModel
    modules: PreTrainedModel
    k_scale: float
    v_scale: float

    @classmethod
    def load(cls, folder: Path, k_scale: float, v_scale: float) -> Fp8Model:
        modules = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=ATTENTION
        )
        return cls(load(folder, "float32", "cpu"), modules.eval(), k_scale, v_scale)

    def logprobs(self, token_ids: Sequence[int], *, rounded: bool = True) -> Tensor:
        """[len(token_ids), vocab], of the whole sequence at once, attention in float64."""
        rows = torch.arange(len(token_ids))
        attention = _IdealAttention(*((self.k_scale, self.v_scale) if rounded else (None, None)))
        logits = run(self.modules, torch.tensor(token_ids), rows, attention, rows)
        return logits.log_softmax(-1)

    def errors(self, prompt: Sequence[int], answer: Answer, *, rounded: bool = True) -> list[float]:
        """How far an answer's logprobs are off, those of the prompt first."""
        reported = [*(answer.prompt_logprobs or ()), *answer.logprobs]
        history = [*prompt, *answer.token_ids]
        expected = self.logprobs(history, rounded=rounded)[:-1]
        rows = range(len(expected) - len(reported), len(expected))
        return [
            abs(item.logprob - float(expected[row, history[row + 1]]))
            for item, row in zip(reported, rows, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _IdealAttention:
    k_scale: float | None
    v_scale: float | None

    def attend(self, call: AttentionCall) -> Tensor:
        """[T, heads, dim] of a whole sequence."""
        group = call.query.shape[1] // call.key.shape[1]
        keys = _rounded(call.key, self.k_scale).repeat_interleave(group, 1)
        values = _rounded(call.value, self.v_scale).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", call.query.double(), keys) * call.scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(call.query.dtype)


def _rounded(exact: Tensor, scale: float | None) -> Tensor:
    if scale is None:
        return exact.double()
    return (exact / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
