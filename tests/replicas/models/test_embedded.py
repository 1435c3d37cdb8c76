"""The model that comes with Quire. Its first use on a machine converts it into the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from replicas.models import loader, sources
from replicas.models.hf_adapter import PagedModel

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder() -> Path:
    return sources.resolve("embedded")


@pytest.fixture(scope="module")
def model(folder) -> PagedModel:
    return loader.load(folder, "float32", "cpu")


def test_the_configuration(folder) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert (config.num_hidden_layers, config.num_attention_heads) == (30, 9)
    assert (config.num_key_value_heads, config.head_dim, config.hidden_size) == (3, 64, 576)
    assert config.rope_parameters["rope_theta"] == 1e5
    assert config.tie_word_embeddings is True
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)


def test_the_tokenizer(folder) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 49152
    assert tokenizer.model_max_length == 8192
    message = {"role": "user", "content": "What is the capital of France?"}
    system = {"role": "system", "content": "Be brief."}
    text = tokenizer.apply_chat_template(
        [system, message], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n" + PROMPT
    ids = tokenizer.encode("Steps:\n\n12. Go")
    assert tokenizer.convert_ids_to_tokens(ids)[2:5] == ["ĊĊ", "1", "2"]
    assert tokenizer.decode(ids) == "Steps:\n\n12. Go"


def test_the_spec(model) -> None:
    spec = model.spec
    assert (spec.num_layers, spec.num_heads, spec.kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.vocab_size, spec.max_position, spec.eos_token_ids) == (49152, 8192, (2,))
    assert spec.num_parameters == 134_515_008


def test_greedy_tokens_equal_those_of_generate(folder, model, make_pool, paged) -> None:
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    reference = AutoModelForCausalLM.from_pretrained(folder)
    expected = reference.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    prompt, pool, blocks = ids[0].tolist(), make_pool(model), (5, 2, 7)
    paged(model, pool, [(prompt[:7], 0, blocks)])
    logits = paged(model, pool, [(prompt[7:], 7, blocks)])
    tokens: list[int] = []
    while len(tokens) < len(expected):
        tokens.append(int(logits[-1].argmax()))
        logits = paged(model, pool, [(tokens[-1:], len(prompt) + len(tokens) - 1, blocks)])
    assert tokens == expected.tolist()
    assert torch.isfinite(logits).all()
