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
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type of the KV pool; auto takes the model's."""
    enable_prefix_caching: bool = True
    """Whether requests share the KV blocks of equal prefixes."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of waiting requests: by arrival, or by `priority` (lower first), then arrival."""
    preemption_mode: Literal["auto", "recompute"] = "auto"
    """How a preempted choice gets its KV back; auto takes recompute, the only mode so far."""
    swap_space: Annotated[float, Field(ge=0.0)] = 0.0
    """GiB of host memory for swapped KV blocks. Only 0: swapping is not built yet."""
    min_progress_tokens: Annotated[int, Field(ge=1, le=65536)] = 8
    """Tokens a resumed choice computes beyond its known history before it may be preempted
    again."""

    @field_validator("block_size")
    @classmethod
    def _check_block_size(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"{value} is not a power of two")
        return value

    @field_validator("kv_cache_dtype", mode="before")
    @classmethod
    def _check_kv_cache_dtype(cls, value: object) -> object:
        if isinstance(value, str) and value.startswith("fp8"):
            raise ValueError(f"{value!r} is not supported yet")
        return value

    @field_validator("preemption_mode", mode="before")
    @classmethod
    def _check_preemption_mode(cls, value: object) -> object:
        if value == "swap":
            raise ValueError("'swap' is not built yet")
        return value

    @field_validator("swap_space")
    @classmethod
    def _check_swap_space(cls, value: float) -> float:
        if value > 0:
            raise ValueError(f"{value:g} asks for swapping, which is not built yet; leave it at 0")
        return value

    @model_validator(mode="after")
    def _check_token_budget(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than "
                f"max_num_seqs {self.max_num_seqs}: each running choice needs one token a step"
            )
        return self
