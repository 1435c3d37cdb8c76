"""What transformers' `generate` makes of the prompts of the acceptance test."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from replicas.models.fingerprint import content_digest

MAX_TOKENS = 64

_TEXT = Path(__file__).parents[3] / "LICENSE"
_SLICES = {
    # tokens: the first one's index. Those at 0 share prefixes of whole and of part blocks.
    1: 0,
    15: 40,
    16: 300,
    17: 300,
    63: 0,
    64: 0,
    65: 0,
    128: 0,
    700: 1000,
    2: 9,
    14: 120,
    31: 200,
    32: 260,
    33: 340,
    47: 420,
    48: 510,
    49: 600,
    80: 700,
    96: 800,
    129: 900,
    200: 0,
    256: 1100,
}
_OPENINGS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived a girl who",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to",
    "Ingredients: 200 g flour, 2 eggs, 100 ml milk.\n\nMethod: 1.",
    "Q: Why is the sky blue?\nA:",
    "<|im_start|>user\nName three rivers in Europe.<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 4, 8, 16,",
    "La plus grande ville du Canada est",
    "import json\n\n\nclass Account:\n",
)


@dataclass(frozen=True, slots=True)
class Reference:
    """A prompt and its greedy continuation of `MAX_TOKENS` tokens."""

    prompt: tuple[int, ...]
    continuation: list[int]


def tokenise_prompts(folder: Path) -> dict[str, list[int]]:
    """By name, the 32 prompts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer(_TEXT.read_text()).input_ids
    slices = {f"{length} tokens": text[at : at + length] for length, at in _SLICES.items()}
    return slices | {opening: tokenizer(opening).input_ids for opening in _OPENINGS}


def generate(folder: Path, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Continue each prompt alone, unpadded, greedily, in float32; takes a minute or two."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    continuations = {}
    for name, prompt in prompts.items():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        continuations[name] = output[0, len(prompt) :].tolist()
    return continuations


def digest(folder: Path, prompts: dict[str, list[int]]) -> str:
    """Of everything the continuations depend on."""
    parts = (torch.__version__, transformers.__version__, str(MAX_TOKENS), json.dumps(prompts))
    return content_digest(folder.glob("*.*"), extra=" ".join(parts))
