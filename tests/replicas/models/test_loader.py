"""Loading a folder: what the spec says, and which dtype it runs in."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from kernels.dispatch import KernelBackendError
from replicas.models import loader
from replicas.models.errors import ModelSourceError, UnsupportedArchitectureError

GATED = {"intermediate_size": 48, "num_key_value_heads": 2}


def test_the_spec(tiny) -> None:
    reference, folder = tiny("qwen3", **GATED, head_dim=16, tie_word_embeddings=True)
    spec = loader.load(folder, "float32", "cpu").spec
    assert spec.architecture == "Qwen3ForCausalLM"
    assert (spec.num_layers, spec.num_heads, spec.kv_heads, spec.head_dim) == (2, 4, 2, 16)
    assert (spec.vocab_size, spec.max_position, spec.dtype) == (101, 128, "float32")
    assert spec.eos_token_ids == (2,)
    assert spec.num_parameters == sum(p.numel() for p in reference.parameters())
    assert spec.num_parameters == sum(
        p.numel()
        for p in {id(p): p for p in reference.state_dict(keep_vars=True).values()}.values()
    )


def test_the_pool_is_as_wide_as_the_widest_head(tiny) -> None:
    _, folder = tiny(
        "deepseek_v3",
        intermediate_size=48,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    assert loader.load(folder, "float32", "cpu").spec.head_dim == 24


def test_eos_ids_of_both_configurations(tiny) -> None:
    _, folder = tiny("llama", **GATED)
    GenerationConfig(eos_token_id=[7, 9]).save_pretrained(folder)
    assert loader.load(folder, "float32", "cpu").spec.eos_token_ids == (7, 9, 2)


def test_no_eos_id(tiny) -> None:
    _, folder = tiny("llama", **GATED, eos_token_id=None)
    assert loader.load(folder, "float32", "cpu").spec.eos_token_ids == ()


def test_longrope_is_served_within_its_original_length(tiny) -> None:
    factors = [1.0] * 4
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
    }
    _, folder = tiny("phi3", **GATED, rope_parameters=rope, original_max_position_embeddings=64)
    assert loader.load(folder, "float32", "cpu").spec.max_position == 64


def test_bfloat16(tiny, make_pool, paged) -> None:
    _, folder = tiny("llama", **GATED)
    tokens = [(5 + 11 * i) % 101 for i in range(20)]
    exact, rounded = (
        paged(model, make_pool(model), [(tokens, 0, (3, 1))])
        for model in (loader.load(folder, dtype, "cpu") for dtype in ("float32", "bfloat16"))
    )
    assert rounded.dtype == torch.float32
    error = (rounded - exact).norm() / exact.norm()
    assert 0 < float(error) < 0.05


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_dtype_follows_the_machine(native, dtype, monkeypatch) -> None:
    monkeypatch.setattr(loader, "has_native_bf16", lambda device: native)
    assert loader.resolve_dtype("auto", "cpu") == dtype
    assert loader.resolve_dtype("float32", "cpu") == torch.float32
    assert loader.resolve_dtype("bfloat16", "cpu") == torch.bfloat16


def test_fingerprints_tell_models_apart(tiny, tmp_path) -> None:
    reference, folder = tiny("llama", **GATED)
    first = loader.load(folder, "float32", "cpu").spec.fingerprint
    copy = tmp_path / "elsewhere"
    reference.save_pretrained(copy)
    assert loader.load(copy, "bfloat16", "cpu").spec.fingerprint == first
    reference.model.norm.weight[3] += 0.5  # as a fine-tune would: equal names, sizes, config
    reference.save_pretrained(copy)
    assert loader.load(copy, "float32", "cpu").spec.fingerprint != first


def test_a_class_with_a_table_of_attentions_is_refused(tiny, monkeypatch) -> None:
    _, folder = tiny("llama", **GATED)

    def look_up(*args: object, **kwargs: object) -> None:
        raise KeyError("quire_paged")

    monkeypatch.setattr(loader.AutoModelForCausalLM, "from_pretrained", look_up)
    with pytest.raises(UnsupportedArchitectureError, match=r"^LlamaForCausalLM is not supported"):
        loader.load(folder, "float32", "cpu")


def test_no_config(tmp_path) -> None:
    with pytest.raises(ModelSourceError, match=r"config\.json"):
        loader.load(tmp_path, "float32", "cpu")


def test_a_model_with_random_weights_needs_no_checkpoint(make_pool, paged) -> None:
    settings = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2} | GATED
    config = AutoConfig.for_model("llama", num_attention_heads=4, **settings)
    models = [loader.from_config(config, "float32", "cpu", seed=seed) for seed in (1, 1, 2)]
    assert models[0].spec == models[1].spec
    assert models[0].spec.fingerprint != models[2].spec.fingerprint
    logits = [paged(model, make_pool(model), [((5, 6, 7), 0, (3,))]) for model in models]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_windows_are_those_of_the_layers(tiny) -> None:
    _, folder = tiny(
        "gemma2",
        **GATED,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    assert loader.load(folder, "float32", "cpu").spec.windows == (8, None)


def test_triton_without_a_gpu_is_refused_before_the_weights_are_read(tmp_path) -> None:
    with pytest.raises(KernelBackendError, match="needs an NVIDIA GPU"):
        loader.load(tmp_path, "float32", "cpu", "triton")
