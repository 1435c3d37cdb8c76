"""EngineConfig refuses what it cannot mean."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from replicas.config import EngineConfig


def _error(**options: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        EngineConfig(**options)
    assert caught.value.error_count() == 1
    return str(caught.value)


def test_defaults_are_valid_and_sized_for_a_small_machine() -> None:
    config = EngineConfig()
    assert config.block_size == 64
    assert config.max_num_batched_tokens >= config.max_num_seqs
    assert EngineConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("size", [1, 2, 16, 64, 256])
def test_powers_of_two_are_block_sizes(size: int) -> None:
    assert EngineConfig(block_size=size).block_size == size


@pytest.mark.parametrize("size", [0, -16, 3, 24, 100, 512, "16", 16.0, True, None])
def test_nothing_else_is(size: Any) -> None:
    assert "block_size" in _error(block_size=size)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 1),
        ("num_gpu_blocks_override", 0),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.01),
        ("kv_cache_memory_gib", 0.0),
        ("kv_cache_memory_gib", float("nan")),
        ("kv_cache_memory_gib", "1"),
        ("kv_cache_dtype", "float16"),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("kernel_backend", "cuda"),
        ("kernel_backend", None),
        ("enable_prefix_caching", "yes"),
        ("scheduling_policy", "lifo"),
        ("preemption_mode", "drop"),
        ("preemption_mode", None),
        ("swap_space", -1),
        ("swap_space", float("inf")),
        ("swap_space", "0.5"),
        ("preemption_policy", "first_admitted"),
        ("min_progress_tokens", 0),
        ("admission", "look-ahead"),
        ("watermark", -0.01),
        ("watermark", 0.51),
        ("preemption_hysteresis", -0.01),
        ("preemption_hysteresis", float("nan")),
        ("preemption_hysteresis", 0.51),
        ("spill_prefix_tokens", 0),
        ("spill_prefix_tokens", 512.0),
        ("restore_patience_s", 0.0),
        ("restore_patience_s", float("inf")),
    ],
)
def test_values_out_of_range_or_type_are_refused_by_name(option: str, value: Any) -> None:
    assert option in _error(**{option: value})


def test_fp8_is_short_for_e4m3() -> None:
    assert EngineConfig(kv_cache_dtype="fp8") == EngineConfig(kv_cache_dtype="fp8_e4m3")
    for name in ("auto", "float32", "bfloat16", "fp8_e4m3"):
        assert EngineConfig(kv_cache_dtype=name).kv_cache_dtype == name  # type: ignore[arg-type]


def test_a_step_has_room_for_a_token_of_each_running_choice() -> None:
    assert "max_num_batched_tokens 63 is less than max_num_seqs 64" in _error(
        max_num_batched_tokens=63, max_num_seqs=64
    )
    EngineConfig(max_num_batched_tokens=64, max_num_seqs=64)


def test_swapping_needs_host_memory() -> None:
    says = "preemption_mode 'swap' needs a host tier: set swap_space above 0 GiB"
    assert says in _error(preemption_mode="swap")
    assert says in _error(preemption_mode="swap", swap_space=0)
    assert EngineConfig(preemption_mode="swap", swap_space=0.5).swap_space == 0.5


@pytest.mark.parametrize("mode", ["auto", "recompute"])
@pytest.mark.parametrize("size", [0.0, 4.0])
def test_other_modes_do_with_or_without(mode: Any, size: float) -> None:
    config = EngineConfig(preemption_mode=mode, swap_space=size)
    assert (config.preemption_mode, config.swap_space) == (mode, size)


def test_the_least_and_the_most_of_the_options_about_shortage() -> None:
    EngineConfig(watermark=0.0, preemption_hysteresis=0.0, spill_prefix_tokens=1)
    EngineConfig(watermark=0.5, preemption_hysteresis=0.5, spill_prefix_tokens=None)
    for policy in ("last_admitted", "priority", "cheapest"):
        for admission in ("look_ahead", "eager"):
            EngineConfig(preemption_policy=policy, admission=admission)


def test_unknown_keys_are_refused() -> None:
    assert "max_model_length" in _error(max_model_length=128)


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        EngineConfig().block_size = 16  # type: ignore[misc]


def test_every_option_says_what_it_means() -> None:
    assert [
        name for name, field in EngineConfig.model_fields.items() if not field.description
    ] == []
