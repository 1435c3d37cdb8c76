"""What one replica's engine may be told."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class EngineConfig(BaseModel):
    """Sizes, policies and memory of one engine.

    Frozen; unknown keys and values of the wrong type (the string "16" for a number) are
    refused with a `pydantic.ValidationError`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    block_size: Annotated[int, Field(ge=1, le=256)] = 64
    """Tokens a KV block holds: a power of two. Larger blocks run faster on CPU, smaller ones
    share more of a prefix."""
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 64
    """Choices that may run at once."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=262144)] = 512
    """Tokens one step may compute; a longer prompt is prefilled in chunks. At least
    `max_num_seqs`, since each running choice needs one token a step."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Tokens a choice may reach, prompt and output together. null takes the model's own
    context, or what the KV pool holds where that is less."""
    num_gpu_blocks_override: Annotated[int, Field(ge=1)] | None = None
    """Usable KV blocks, exactly, on any device; null sizes the pool from memory."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Share of a GPU's memory for weights, activations and the KV pool together."""
    kv_cache_memory_gib: Annotated[float, Field(gt=0.0, le=16384.0)] = 1.0
    """GiB of a CPU replica's KV pool. Ignored on a GPU."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "fp8", "fp8_e4m3"] = "auto"
    """Element type of the KV pool; auto takes the model's. fp8 is short for fp8_e4m3: a byte an
    element, with a scale for each layer, K or V, and kv head, read from the checkpoint or else
    calibrated at load. It holds twice the tokens of bfloat16, costs accuracy, and on CPU speed."""
    kernel_backend: Literal["auto", "triton", "torch"] = "auto"
    """Who computes attention and the work around it: Triton's kernels, for NVIDIA GPUs, or torch,
    on any device. auto takes Triton's where there is a GPU."""
    enable_prefix_caching: bool = True
    """Whether requests share the KV blocks of equal prefixes."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of waiting requests: by arrival, or by `priority` (lower first), then arrival."""
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    """How a preempted choice gets its KV back: computed again, or kept in the host tier and
    copied back. auto takes, each time, what costs less by measured rates; without a host tier
    (`swap_space` 0) that is recompute. recompute writes nothing for a preempted choice; a host
    tier beside it keeps evicted prefixes all the same, and gives them to a choice that comes back
    as to a new one. In every mode prefixes are written, and read again, only where the copies
    cost less than computing by measured rates; what swap kept of a choice is read at any price."""
    swap_space: Annotated[float, Field(ge=0.0, le=16384.0)] = 0.0
    """GiB of host memory for each replica's host tier, which keeps the KV of preempted choices
    and of evicted prefixes; 0 for none."""
    preemption_policy: Literal["last_admitted", "priority", "cheapest"] = "priority"
    """Who gives way when blocks run short: the choice admitted last; the last admitted of the
    lowest class, which is the same under `fcfs`; or the one that frees the most blocks for what
    its return costs."""
    min_progress_tokens: Annotated[int, Field(ge=1, le=65536)] = 8
    """Tokens a resumed choice computes beyond its known history before it may be preempted
    again."""
    admission: Literal["look_ahead", "eager"] = "look_ahead"
    """Whether a waiting choice is let in beside running ones where their expected output would
    still fit, or as soon as the tokens known so far do."""
    watermark: Annotated[float, Field(ge=0.0, le=0.5)] = 0.01
    """Share of the KV pool that admitting a choice beside running ones leaves free."""
    preemption_hysteresis: Annotated[float, Field(ge=0.0, le=0.5)] = 0.05
    """Share of the KV pool that must be free, after a preemption, before a new request is
    admitted; holds until a running choice ends."""
    overcommit: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Share of the KV pool by which the peak that look_ahead expects may exceed it: a few
    preemptions cost less than a pool that is full at the peak only."""
    spill_prefix_tokens: Annotated[int, Field(ge=1)] | None = 512
    """Tokens of an ended choice's cached prefix from which on it is written to the host tier
    before it is evicted even if it was never hit, where that pays. null writes only prefixes that
    were hit."""
    restore_patience_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 5.0
    """Seconds that a restore from the host tier may take; a longer one is given up, and the KV
    computed again."""

    @field_validator("block_size")
    @classmethod
    def _check_block_size(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"{value} is not a power of two")
        return value

    @field_validator("kv_cache_dtype")
    @classmethod
    def _resolve_alias(cls, value: str) -> str:
        return "fp8_e4m3" if value == "fp8" else value

    @model_validator(mode="after")
    def _check_token_budget(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than "
                f"max_num_seqs {self.max_num_seqs}: each running choice needs one token a step"
            )
        return self

    @model_validator(mode="after")
    def _check_swap_space(self) -> Self:
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ValueError("preemption_mode 'swap' needs a host tier: set swap_space above 0 GiB")
        return self
