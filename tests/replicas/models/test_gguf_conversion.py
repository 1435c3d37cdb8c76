"""A .gguf file becomes a folder: once, whole, and right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from replicas.models import gguf_conversion
from replicas.models.errors import ModelSourceError, UnsupportedArchitectureError
from replicas.models.gguf_conversion import convert

HEADS, KV_HEADS, HIDDEN, MLP = 4, 2, 32, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BLANKS = "ĠĠ"
"""Two blanks, merged into a token."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotary halves as llama.cpp has them: neighbours, not half a head apart."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def tensors(model: torch.nn.Module) -> Iterator[tuple[str, np.ndarray]]:
    for name, parameter in model.named_parameters():
        array = parameter.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = interleave(array, HEADS if "q_proj" in name else KV_HEADS)
        renamed = name
        for theirs, ours in NAMES.items():
            renamed = renamed.replace(theirs, ours)
        yield renamed, array


def write(path, model: torch.nn.Module | None, tokens: list[str], architecture="llama") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, array in tensors(model) if model is not None else ():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tokens() -> list[str]:
    return [*SPECIAL, *bytes_to_unicode().values(), BLANKS]


@pytest.fixture
def made(tmp_path, tiny, tokens):
    """A tiny model and the .gguf file of it."""
    model, _ = tiny(
        "llama",
        vocab_size=len(tokens),
        intermediate_size=MLP,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    path = tmp_path / "tiny.gguf"
    write(path, model, tokens)
    return model, path


def test_the_folder_holds_the_same_model(made, tmp_path) -> None:
    model, path = made
    lines: list[str] = []
    folder = convert(path, cache=tmp_path, progress=lines.append)
    converted = AutoModelForCausalLM.from_pretrained(folder)
    assert converted.dtype == torch.float32
    config = converted.config
    assert not hasattr(config, "quantization_config")
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (2, 2, 1)
    assert converted.generation_config.eos_token_id == 2
    ids = torch.tensor([[7, 70, 170, 17, 1]])
    torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert [line.split()[0] for line in lines] == ["converting", "converted"]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 64
    assert tokenizer.chat_template == "{{ messages }}"
    split = tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12"))
    assert split == ["a", BLANKS, "1", "2"]  # GPT-2's rule would part the blanks

    again: list[str] = []
    assert convert(path, cache=tmp_path, progress=again.append) == folder
    assert again == []


def test_another_file_of_the_same_name_is_another_model(made, tmp_path, tiny, tokens) -> None:
    model, path = made
    first = gguf_conversion.folder_name(path)
    model.model.norm.weight.mul_(2)
    write(path, model, tokens)
    assert gguf_conversion.folder_name(path) != first


def test_two_processes_convert_once(made, tmp_path) -> None:
    _, path = made
    code = (
        "import sys; from pathlib import Path; from replicas.models.gguf_conversion import convert;"
        "print(convert(Path(sys.argv[1]), cache=Path(sys.argv[2]), progress=print))"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=100) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    lines = [output.splitlines() for output, _ in outputs]
    assert lines[0][-1] == lines[1][-1]
    assert sorted(map(len, lines)) == [1, 3]  # the other one waited, and then just used it
    assert not list((tmp_path / "models").glob("*.partial"))


def test_what_a_killed_conversion_left_does_not_matter(made, tmp_path) -> None:
    _, path = made
    name = gguf_conversion.folder_name(path)
    partial = tmp_path / "models" / f".{name}.partial"
    partial.mkdir(parents=True)
    (partial / "junk.safetensors").touch()
    (tmp_path / "models" / f".{name}.lock").touch()
    folder = convert(path, cache=tmp_path)
    assert not partial.exists()
    assert not (folder / "junk.safetensors").exists()


def test_a_failed_conversion_leaves_no_folder(made, tmp_path, monkeypatch) -> None:
    _, path = made

    def fill_the_disk(source, folder) -> None:
        folder.mkdir()
        (folder / "config.json").touch()
        raise OSError("No space left on device")

    monkeypatch.setattr(gguf_conversion, "_write", fill_the_disk)
    with pytest.raises(ModelSourceError, match=r"cannot convert .*tiny\.gguf.* No space left"):
        convert(path, cache=tmp_path)
    left = [entry for entry in (tmp_path / "models").iterdir() if entry.suffix != ".lock"]
    assert left == []


def test_something_else_named_gguf(tmp_path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("not a model")
    with pytest.raises(ModelSourceError, match=r"^cannot convert .*text\.gguf: "):
        convert(path, cache=tmp_path)


def test_a_misfit_is_refused_before_its_weights_are_read(tmp_path, tokens) -> None:
    path = tmp_path / "falcon.gguf"
    write(path, None, tokens, architecture="falcon")
    with pytest.raises(UnsupportedArchitectureError, match=r"^falcon is not supported"):
        convert(path, cache=tmp_path)


def test_missing_packages_are_named(made, tmp_path, monkeypatch) -> None:
    _, path = made
    monkeypatch.setattr(gguf_conversion.util, "find_spec", lambda name: None)
    with pytest.raises(ModelSourceError, match=r"accelerate and gguf: pip install 'quire\[embe"):
        convert(path, cache=tmp_path)
