"""Modules as they are built for a GPU, with torch's ops: they compute what they replace."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from kernels.elementwise import TorchElementwise
from replicas.models import gated_mlp, loader, module_swap
from replicas.models.fused_attention import FusedAttention
from replicas.models.fused_decoder_layer import FusedDecoderLayer
from replicas.models.gated_mlp import FusedGatedMLP, fuse_mlps
from replicas.models.hf_adapter import ATTENTION

GATED = {"intermediate_size": 48, "num_key_value_heads": 2}
HEADS = GATED | {"head_dim": 16}
WINDOW = {"sliding_window": 8}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

FUSED = {
    "llama": GATED,
    "llama with biases": GATED | {"attention_bias": True, "mlp_bias": True},
    "mistral": HEADS | WINDOW,
    "qwen2": GATED,
    "qwen3": HEADS,
    "qwen3_moe": HEADS | EXPERTS,
    "gemma2": HEADS | WINDOW | ALTERNATING | {"query_pre_attn_scalar": 16},
    "gemma3_text": HEADS | WINDOW | ALTERNATING | {"query_pre_attn_scalar": 16},
    "phi3": GATED | WINDOW,
    "phi3 with partial rotation": GATED | {"rope_parameters": PARTIAL},
}
"""Attention and decoder layers are replaced in all of these."""
LEFT = {
    "gpt2": {},
    "gptj": {"rotary_dim": 4},
    "olmo2": GATED,  # its norms span all heads
    "cohere2": HEADS | WINDOW | ALTERNATING,  # it turns neighbours, where it turns at all
    "glm4": HEADS,
    "gpt_oss": HEADS | WINDOW | ALTERNATING | {"num_local_experts": 4},  # half-width tables
    "deepseek_v3": {
        "intermediate_size": 48,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}
"""Attention stays as transformers has it."""
TOKENS = [(5 + 11 * i) % 101 for i in range(37)]


def fused(tiny, name: str, **settings: object) -> tuple[PreTrainedModel, torch.Tensor]:
    """(a model with its modules replaced, the logits that it had before)."""
    model, _ = tiny(name.split(maxsplit=1)[0], **settings)
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    model.set_attn_implementation(ATTENTION)
    module_swap.swap_for_gpu(model, TorchElementwise())
    return model, expected


def kinds(model: nn.Module) -> Counter[str]:
    return Counter(type(module).__name__ for module in model.modules())


def logits(model: PreTrainedModel, make_pool, paged) -> torch.Tensor:
    """In three chunks, by paged attention, after a dry run."""
    served = loader.describe(model, "", 0)
    pool = make_pool(served)
    starts = (0, 7, 33, 34)
    parts = [TOKENS[a:b] for a, b in zip(starts, (*starts[1:], len(TOKENS)), strict=True)]
    return torch.cat(
        [
            paged(served, pool, [(part, start, (4, 7, 9))])
            for part, start in zip(parts, starts, strict=True)
        ]
    )


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Greatest difference, in units of the logits' spread."""
    return float((actual - expected).abs().max() / expected.std())


@pytest.mark.parametrize("name", FUSED)
def test_fused_models_keep_their_logits(name, tiny, make_pool, paged) -> None:
    model, expected = fused(tiny, name, **FUSED[name])
    found = kinds(model)
    assert (found["FusedAttention"], found["FusedDecoderLayer"]) == (2, 2), found
    assert error(logits(model, make_pool, paged), expected) < 1e-4


@pytest.mark.parametrize("name", LEFT)
def test_attention_of_another_kind_stays(name, tiny, make_pool, paged) -> None:
    model, expected = fused(tiny, name, **LEFT[name])
    assert kinds(model)["FusedAttention"] == (1 if name == "cohere2" else 0)
    assert error(logits(model, make_pool, paged), expected) < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"])
def test_bfloat16_models_are_fused_as_well(name, tiny) -> None:
    """Roundings differ there, and must not pass for another computation."""
    model, _ = tiny(name, **FUSED[name])
    model.to(torch.bfloat16).set_attn_implementation(ATTENTION)
    module_swap.swap_for_gpu(model, TorchElementwise())
    found = kinds(model)
    wanted = {"FusedAttention": 2, "FusedDecoderLayer": 2, "FusedGatedMLP": 2}
    assert {kind: found[kind] for kind in wanted} == wanted


def test_fused_layers_share_the_weights_of_what_they_replace(tiny) -> None:
    """Twice the weights of attention would be a third more for some models."""
    model, _ = fused(tiny, "llama", **FUSED["llama"])
    attention = model.model.layers[0].self_attn
    memory = attention.qkv_proj.weight.untyped_storage().data_ptr()
    for part in ("q_proj", "k_proj", "v_proj"):
        weight = attention.original.get_submodule(part).weight
        assert weight.untyped_storage().data_ptr() == memory


def test_attention_that_asks_for_something_else_stays(tiny) -> None:
    model, _ = tiny("llama", **GATED)
    model.set_attn_implementation(ATTENTION)

    class ScaledAttention(type(model.model.layers[0].self_attn)):  # type: ignore[misc]
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states * 1.5, **kwargs)

    model.model.layers[0].self_attn.__class__ = ScaledAttention
    module_swap.swap_for_gpu(model, TorchElementwise())
    kept, replaced = (layer.self_attn for layer in model.model.layers)
    assert type(kept) is ScaledAttention
    assert type(replaced) is FusedAttention


def test_a_layer_of_another_kind_stays(tiny) -> None:
    model, _ = tiny("llama", **GATED)
    model.set_attn_implementation(ATTENTION)

    class ScaledLayer(type(model.model.layers[0])):  # type: ignore[misc]
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states, **kwargs) * 1.01

    model.model.layers[0].__class__ = ScaledLayer
    module_swap.swap_for_gpu(model, TorchElementwise())
    assert [type(layer) for layer in model.model.layers] == [ScaledLayer, FusedDecoderLayer]


def test_an_mlp_of_another_kind_is_not_fused(tiny) -> None:
    model, _ = tiny("llama", **GATED)

    class ScaledMLP(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x):
            return super().forward(x) * 1.1

    model.model.layers[0].mlp.__class__ = ScaledMLP
    fuse_mlps(model, TorchElementwise())
    assert [type(layer.mlp) for layer in model.model.layers] == [ScaledMLP, FusedGatedMLP]


def test_no_weights_of_mlps_are_held_twice(tiny, monkeypatch) -> None:
    """Else loading a model would take much more memory than serving it."""
    model, _ = tiny("llama", **GATED, num_hidden_layers=4)
    held = [weakref.ref(layer.mlp.gate_proj.weight) for layer in model.model.layers]
    alive = []
    fuse = gated_mlp.fuse_linears

    def counting(parts):
        alive.append(sum(ref() is not None for ref in held))
        return fuse(parts)

    monkeypatch.setattr(gated_mlp, "fuse_linears", counting)
    fuse_mlps(model, TorchElementwise())
    assert alive == [4, 3, 2, 1]


@pytest.mark.parametrize(("name", "is_silu"), [("llama", True), ("gemma2", False)])
@pytest.mark.parametrize("of_torch", [True, False])
def test_the_gate_is_the_kernels_where_it_is_silu(
    tiny, name: str, is_silu: bool, of_torch: bool
) -> None:
    """Whichever class computes it: transformers has another one than torch."""
    model, _ = tiny(name, **FUSED[name])
    if of_torch and is_silu:
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.SiLU(inplace=True)
    calls = []

    class Counting(TorchElementwise):
        def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
            calls.append(gate_up.shape)
            return super().silu_mul(gate_up)

    fuse_mlps(model, Counting())
    calls.clear()
    model(torch.tensor([TOKENS]), use_cache=False)
    assert calls == [(1, len(TOKENS), 2 * 48)] * (2 if is_silu else 0)
