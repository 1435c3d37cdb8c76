"""Paged attention gives the logits that transformers' eager attention gives."""

from __future__ import annotations

import pytest
import torch

from replicas.models import loader

GATED = {"intermediate_size": 48, "num_key_value_heads": 2}
HEADS = GATED | {"head_dim": 16}
WINDOW = {"sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}

MODELS = {
    "llama": GATED,
    "mistral": HEADS | WINDOW,
    "qwen2": GATED,
    "qwen3": HEADS,
    "qwen3_moe": HEADS | EXPERTS,
    "gemma": HEADS,
    "gemma2": HEADS | WINDOW | ALTERNATING | {"query_pre_attn_scalar": 16},
    "gemma3_text": HEADS | WINDOW | ALTERNATING | {"query_pre_attn_scalar": 16},
    "phi": GATED,
    "phi3": GATED | WINDOW,
    "gpt2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gptj": {"rotary_dim": 4},
    "gpt_neox": {"intermediate_size": 48},
    "mixtral": GATED | {"num_local_experts": 4},
    "olmo2": GATED,
    "olmo3": GATED | WINDOW | ALTERNATING,
    "granite": GATED,
    "gpt_oss": HEADS | WINDOW | ALTERNATING | {"num_local_experts": 4},
    "starcoder2": GATED | WINDOW,
    "cohere2": HEADS | WINDOW | ALTERNATING,
    "glm4": HEADS,
    "smollm3": GATED,
    "deepseek_v3": {
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}


@pytest.mark.parametrize("model_type", MODELS)
def test_whole_and_chunked_prefill_equal_eager_attention(
    model_type, tiny, make_pool, paged
) -> None:
    reference, folder = tiny(model_type, **MODELS[model_type])
    tokens = [(5 + 11 * i) % 101 for i in range(37)]
    other = [(3 + 29 * i) % 101 for i in range(19)]
    with torch.no_grad():
        expected, expected_other = (
            reference(torch.tensor([ids]), use_cache=False).logits[0] for ids in (tokens, other)
        )
        alone = reference(torch.tensor([[tokens[-1]]]), position_ids=torch.tensor([[36]])).logits[0]
    assert error(alone, expected[-1:]) > 0.1  # without its context a token has other logits
    model = loader.load(folder, "float32", "cpu")

    whole = paged(model, make_pool(model), [(tokens, 0, (3, 1, 5))])
    assert error(whole, expected) < 1e-4

    pool = make_pool(model)
    first = paged(model, pool, [(tokens[:7], 0, (4,)), (other[:17], 0, (2, 6))])
    second = paged(model, pool, [(other[17:], 17, (2, 6)), (tokens[7:33], 7, (4, 7, 9))])
    third = paged(model, pool, [(tokens[33:34], 33, (4, 7, 9))])
    fourth = paged(model, pool, [(tokens[34:], 34, (4, 7, 9))])
    assert error(torch.cat([first[:7], second[2:], third, fourth]), expected) < 1e-4
    assert error(torch.cat([first[7:], second[:2]]), expected_other) < 1e-4


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Greatest difference, in units of the logits' spread."""
    return float((actual - expected).abs().max() / expected.std())
