"""The few compilations of all that the test suite does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.kernels.aot.compiling import Target
from tests.kernels.aot.farm import Job

if TYPE_CHECKING:
    from kernels.gpu.launch import Launch


@dataclass(frozen=True, slots=True)
class Choice:
    """The first variant of `op` that has these types and constants, for some targets."""

    op: str
    having: Mapping[str, Any]
    aligned: tuple[int, ...] = (80, 90, 100)
    unaligned: tuple[int, ...] = ()

    def matches(self, launch: Launch) -> bool:
        fields = {**launch.types, **launch.constants}
        return self.op == launch.op and self.having.items() <= fields.items()


LLAMA_8B = {"GROUP": 4, "HEAD_DIM": 128, "BLOCK_SIZE": 64}
SMALL_BLOCKS = LLAMA_8B | {"BLOCK_SIZE": 16}
LLAMA_1B = {"GROUP": 4, "HEAD_DIM": 64, "BLOCK_SIZE": 64}
SMOLLM = {"GROUP": 3, "HEAD_DIM": 64, "BLOCK_SIZE": 64}
PHI_3 = {"GROUP": 1, "HEAD_DIM": 96, "BLOCK_SIZE": 64}
GEMMA_2 = {"GROUP": 2, "HEAD_DIM": 256, "BLOCK_SIZE": 64, "CAPPED": True}
GPT_OSS = {"GROUP": 8, "HEAD_DIM": 64, "BLOCK_SIZE": 64}
BF16, FP8 = {"key_blocks": "*bf16"}, {"key_blocks": "*fp8e4nv"}
VOCABULARY = {"VOCAB_STRIDE": 128_000}
SAMPLING = ("peaks", "bins", "interval", "candidates", "threshold", "race", "pick")
EVERY = (80, 90, 100)

CHOICES = (
    Choice("attn_decode", LLAMA_8B | BF16, EVERY, EVERY),
    Choice("attn_decode", LLAMA_8B | FP8, (90, 100), (90,)),
    Choice("attn_decode", SMALL_BLOCKS | BF16, EVERY),
    Choice("attn_decode", SMALL_BLOCKS | FP8, (90,)),
    Choice("attn_decode", LLAMA_1B | BF16, EVERY),
    Choice("attn_decode", PHI_3 | BF16, (90,)),
    Choice("attn_decode", GEMMA_2 | BF16, EVERY),
    Choice("attn_decode", LLAMA_1B | FP8, (90,)),
    Choice("attn_prefill", LLAMA_8B | BF16, EVERY, (80, 90)),
    Choice("attn_prefill", LLAMA_8B | FP8, (90, 100)),
    Choice("attn_prefill", SMALL_BLOCKS | BF16, (90,)),
    Choice("attn_prefill", LLAMA_1B | BF16, EVERY),
    Choice("attn_prefill", SMOLLM | BF16, (90,)),
    Choice("attn_prefill", PHI_3 | BF16 | {"WINDOWED": True}, (90,)),
    Choice("attn_prefill", GEMMA_2 | BF16 | {"WINDOWED": True}, EVERY),
    Choice("attn_prefill", GPT_OSS | BF16 | {"WINDOWED": True, "sinks": "*bf16"}, (90,)),
    Choice("attn_merge", {"VALUE_DIM": 128}, EVERY, (90,)),
    Choice("attn_merge", {"sinks": "*bf16"}, (90,)),
    Choice("kv_write", {"DIM": 128, "ROT_DIM": 128} | BF16, EVERY, EVERY),
    Choice("kv_write", {"DIM": 128, "ROT_DIM": 128} | FP8, (90, 100), (90,)),
    Choice("kv_write", {"DIM": 128, "q_norm": "*bf16"} | BF16, (90,)),
    Choice("kv_write", {"DIM": 256, "q_norm": "*fp32"} | BF16, (90,)),
    Choice("kv_write", {"DIM": 80, "ROT_DIM": 32} | BF16, (90,)),
    Choice("kv_write", {"DIM": 64, "ROT_DIM": 0} | BF16, (90,)),
    Choice("kv_write", {"DIM": 192, "VALUE_DIM": 128} | BF16, (90,)),
    Choice("rms_norm", {"BLOCK": 4096, "residual": "*bf16", "ROUNDED": True}, EVERY, EVERY),
    Choice("rms_norm", {"BLOCK": 16384, "residual": "*bf16", "weight": "*fp32"}, (90,)),
    Choice("silu_mul", {}, EVERY, EVERY),
    Choice("block_gather", {}, EVERY, EVERY),
    Choice("block_scatter", {}, EVERY, EVERY),
    Choice("block_copy", {"PAIRS": 1}, EVERY, (90,)),
    Choice("block_copy", {"PAIRS": 32}, EVERY),
    Choice("allow_only", VOCABULARY, EVERY, (90,)),
    Choice("edit_scores", VOCABULARY, EVERY),
    *(Choice(f"sample_{step}", VOCABULARY, EVERY) for step in SAMPLING),
)
"""Common shapes, the widest and the narrowest; unaligned where it says something."""


def chosen(listed: Mapping[int, Sequence[Launch]]) -> Iterator[Job]:
    """Out of what is listed by architecture.

    Raises:
        LookupError: nothing listed matches a choice.
    """
    for choice in CHOICES:
        for aligned in (True, False):
            for arch in choice.aligned if aligned else choice.unaligned:
                index = _find(choice, listed[arch])
                yield Job(index, listed[arch][index].key, Target(arch, aligned))


def _find(choice: Choice, launches: Sequence[Launch]) -> int:
    for index, launch in enumerate(launches):
        if choice.matches(launch):
            return index
    raise LookupError(f"nothing listed is as {choice}")
