"""What paged attention would compute wrongly is refused at load, by name."""

from __future__ import annotations

import json

import pytest
import torch

from replicas.models import architectures, dry_run, hf_adapter, loader
from replicas.models.architectures import check_architecture
from replicas.models.errors import UnsupportedArchitectureError

REFUSED = {
    "bloom": {"n_head": 4},
    "falcon": {},
    "llama4_text": {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 2},
    "qwen3_next": {
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_an_architecture_is_refused_by_its_config_alone(model_type, tmp_path) -> None:
    name = f"{model_type.title()}Whatever"
    config = {"model_type": model_type, "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedArchitectureError, match=f"^{name} is not supported: "):
        loader.load(tmp_path, "float32", "cpu")


@pytest.mark.parametrize("model_type", REFUSED)
def test_an_architecture_is_refused_by_what_it_does(model_type, tiny, monkeypatch) -> None:
    """A name that is not on the list does not help."""
    reference, folder = tiny(model_type, **REFUSED[model_type])
    monkeypatch.setattr(architectures, "_REFUSED", {})
    with pytest.raises(UnsupportedArchitectureError, match=f"^{type(reference).__name__} is not"):
        loader.load(folder, "float32", "cpu")


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(UnsupportedArchitectureError, match=r"T5Whatever .* encoder-decoder"):
        check_architecture({"architectures": ["T5Whatever"], "is_encoder_decoder": True})


def test_layer_types_of_a_text_config_count() -> None:
    config = {"model_type": "many", "text_config": {"layer_types": ["chunked_attention"]}}
    with pytest.raises(UnsupportedArchitectureError, match=r"many .* type chunked_attention"):
        check_architecture(config)


@pytest.fixture
def model(tiny):
    model, _ = tiny("mistral", num_key_value_heads=2, intermediate_size=48, sliding_window=8)
    model.set_attn_implementation(hf_adapter.ATTENTION)
    return model


def test_shapes_are_those_that_attention_sees(model) -> None:
    shapes = dry_run.inspect(model)
    assert (shapes.num_layers, shapes.num_heads, shapes.kv_heads) == (2, 4, 2)
    assert (shapes.key_dim, shapes.value_dim, shapes.vocab_size) == (8, 8, 101)
    assert model.config._attn_implementation == hf_adapter.ATTENTION


def misfit(model, text: str) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=f"^MistralForCausalLM .*{text}"):
        dry_run.inspect(model)


def test_a_layer_that_attends_twice_is_refused(model) -> None:
    model.model.layers[1].self_attn.layer_idx = 0
    misfit(model, "1 of 2 layers call attention, 2 times")


def test_layers_of_other_shapes_are_refused(model) -> None:
    attention = model.model.layers[1].self_attn
    attention.k_proj = torch.nn.Linear(32, 32, bias=False)
    attention.v_proj = torch.nn.Linear(32, 32, bias=False)
    misfit(model, "its layers differ in their heads")


def test_a_window_that_attention_does_not_see_is_refused(model) -> None:
    model.config.sliding_window = 9  # no run of a few tokens could tell
    for layer in model.model.layers:
        layer.self_attn.config = type(model.config)(
            **model.config.to_dict() | {"sliding_window": 8}
        )
        layer.self_attn.config._attn_implementation = hf_adapter.ATTENTION
    misfit(model, "layer 0 attends with a window of 8, not 9")


def test_attention_that_is_not_causal_is_refused(model) -> None:
    model.model.layers[1].self_attn.is_causal = False
    misfit(model, "its attention is not causal")


def test_other_logits_are_refused(model, monkeypatch) -> None:
    attend = hf_adapter.PagedAttention.attend
    monkeypatch.setattr(
        hf_adapter.PagedAttention, "attend", lambda self, call: attend(self, call) * 1.1
    )
    misfit(model, "its logits are off by .* with paged attention")


def test_a_model_that_cannot_run_is_refused(model) -> None:
    del model.model.layers[1].self_attn.layer_idx
    misfit(model, "a dry run fails with AttributeError: .*layer_idx")
