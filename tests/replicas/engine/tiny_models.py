"""Models of two layers with random weights, in which every token of the context matters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from replicas.models.hf_adapter import PagedModel
from replicas.models.loader import load
from tests.replicas.engine.driver import LOGPROB_TOLERANCE, Answer

VOCAB_SIZE = 192
EOS = 2
WINDOW = 11

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_ONE_SLIDES = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen3": {"head_dim": 24},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 10.0,
        **_ONE_SLIDES,
    },
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 24, **_ONE_SLIDES},
    "phi3": {},
    "mixtral": _EXPERTS,
    "gpt_oss": {"head_dim": 16, **_ONE_SLIDES, **_EXPERTS, **_PLAIN_ROPE},
}
"""By model type, what differs from the common configuration."""


@dataclass(frozen=True, slots=True)
class Twin:
    """One model twice: as the engine runs it, and as transformers does."""

    paged: PagedModel
    reference: PreTrainedModel

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy continuation of one unpadded prompt, by transformers' `generate`."""
        output = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        continuation: list[int] = output[0, len(prompt) :].tolist()
        return continuation

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[len(token_ids), vocab], by one pass of transformers without a cache."""
        logits: Tensor = self.reference(torch.tensor([token_ids]), use_cache=False).logits
        return logits[0]

    def check_logprobs(self, prompt: Sequence[int], answer: Answer) -> None:
        """Raise AssertionError unless the answer's logprobs are those of transformers."""
        reported = [*(answer.prompt_logprobs or ()), *answer.logprobs]
        assert len(reported) >= len(answer.token_ids)
        history = [*prompt, *answer.token_ids]
        scores = self.logits(history)[:-1].log_softmax(-1)
        expected = [float(row[token]) for row, token in zip(scores, history[1:], strict=True)]
        assert [item.logprob for item in reported] == pytest.approx(
            expected[-len(reported) :], abs=LOGPROB_TOLERANCE
        )


def make_twin(folder: Path, model_type: str, **changes: Any) -> Twin:
    """Save a random model of this type and load it in both ways, in float32."""
    config = AutoConfig.for_model(model_type, **(_COMMON | CONFIGS[model_type] | changes))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model)
    model.save_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return Twin(load(folder, "float32", "cpu"), reference.eval())


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """`length` token ids, none of them special; another prompt for each (length, seed)."""
    source = random.Random(f"{length} {seed}")
    return tuple(source.randrange(3, VOCAB_SIZE) for _ in range(length))


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Weights large enough that attention is sharp and the likeliest tokens differ.

    transformers' own small ones leave the residual stream to the last token's embedding,
    and a wrong context unseen.
    """
    embedding_std = model.config.hidden_size**-0.5 if "gemma" in model.config.model_type else 1.0
    for name, parameter in model.named_parameters():
        if "embed" in name:
            parameter.normal_(std=embedding_std)
        elif parameter.dim() > 1:
            parameter.normal_(std=1.6 * parameter.shape[-1] ** -0.5)
        elif "sinks" in name:
            parameter.normal_()
