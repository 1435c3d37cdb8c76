"""What the sections other than benches have rows for."""

from __future__ import annotations

CEILINGS = (
    "copy on the device",
    "read on the device",
    "matmul bf16 8,192",
    "pinned copy to host",
    "pinned copy from host",
    "pinned copies both ways",
)
COMPILED = ("what the sections launch compiles", "variants of the engine compile")
ELEMENTWISE_CHECKS = (
    "block_copy bit-exact",
    "block_gather, block_scatter bit-exact",
    "silu_mul right",
    "rms_norm + residual right",
    "kv_write right",
    "kv_write fp8 right",
    "elementwise repeats bit-equal",
)
ATTENTION_CHECKS = (
    "attention fp16 right",
    "attention bf16 right",
    "attention fp32 right",
    "attention fp8 KV right",
    "attention no worse than 1.5x SDPA",
    "attention repeats bit-equal",
)
SAMPLE_CHECKS = (
    "sample keeps what a sort keeps",
    "sample draws by chi-square",
    "sample draws the CPU sampler's tokens",
)
GRAPH_CHECKS = (
    "attention replay equals eager",
    "engine replay equals eager",
    "engine pads batches without effect",
)
GREEDY = (
    "engine greedy float32 is HF's",
    "engine greedy bfloat16 is HF's",
    "engine greedy fp8 KV is torch's",
)
ENGINE_SPEED = (
    "engine decode B1 x 1k",
    "engine decode B64 x 1k",
    "engine prefill 2k chunks",
)
SWAP_LENGTHS = (512, 2048, 8192, 32768)
SWAP = (
    "swap out",
    "swap in",
    "decode beside swap",
    *(f"swap or recompute {length} tokens" for length in SWAP_LENGTHS),
)
