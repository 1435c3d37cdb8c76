"""What one replica's metrics say of steps made by hand."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from replicas.core.scheduler_output import FinishedChoice, ResumeCost, StepOutcome
from replicas.core.scheduler_stats import SchedulerStats
from replicas.metrics import EngineMetrics
from replicas.protocol import EngineInfo, FinishReason, ReplicaSnapshot

INFO = EngineInfo(
    device="cpu",
    dtype="bfloat16",
    kv_dtype="float32",
    block_size=16,
    num_blocks=40,
    max_model_len=100,
    vocab_size=512,
    block_bytes=1024,
    host_blocks=80,
)
SNAPSHOT = ReplicaSnapshot(
    running=3,
    waiting=5,
    used_blocks=10,
    cached_blocks=4,
    pending_tokens=77,
    empty_slots=13,
    host_blocks=20,
    pinned_host_blocks=6,
    copies=2,
)
STATS = SchedulerStats(
    preemptions=9,
    swaps=2,
    prefix_cache_queries=101,
    prefix_cache_hits=32,
    prompt_tokens=103,
    generation_tokens=104,
    computed_tokens=105,
    recomputed_tokens=21,
    restored_tokens=48,
    host_cache_queries=69,
    host_cache_hits=16,
    written_bytes=4096,
    read_bytes=2048,
    spilled_blocks=7,
    failed_copies=1,
    finished={FinishReason.STOP: 11, FinishReason.LENGTH: 12},
)
OUTCOME = StepOutcome(
    finished=(
        FinishedChoice(
            reason=FinishReason.STOP,
            num_prompt_tokens=30,
            num_output_tokens=5,
            max_tokens=60,
            preemptions=2,
            queue_s=1.0,
            prefill_s=2.0,
            decode_s=4.0,
            e2e_s=7.0,
        ),
    ),
    first_token_s=(0.5, 0.25),
    inter_token_s=(0.125,),
    resumed=(
        ResumeCost(("a", 0), swapped=True, predicted_s=0.5, actual_s=0.25, stall_s=2.0),
        ResumeCost(("b", 0), swapped=False, predicted_s=0.25, actual_s=1.0, stall_s=0.75),
        ResumeCost(("b", 1), swapped=False, predicted_s=0.75, actual_s=0.5, stall_s=0.5),
        ResumeCost(("c", 0), swapped=False, predicted_s=0.5, actual_s=0.0, stall_s=0.0),
    ),
)

# The exposition of everything above. Of histograms, the sum and the count; `le` stands below.
SAMPLES = {
    "vllm:num_requests_running": 3,
    "vllm:num_requests_waiting": 5,
    "vllm:kv_cache_usage_perc": 0.25,
    "vllm:num_preemptions_total": 9,
    "vllm:prefix_cache_queries_total": 101,
    "vllm:prefix_cache_hits_total": 32,
    "vllm:external_prefix_cache_queries_total": 69,
    "vllm:external_prefix_cache_hits_total": 16,
    "vllm:prompt_tokens_total": 103,
    "vllm:prompt_tokens_cached_total": 48,
    "vllm:generation_tokens_total": 104,
    "vllm:request_success_total finished_reason=stop": 11,
    "vllm:request_success_total finished_reason=length": 12,
    "vllm:time_to_first_token_seconds_count": 2,
    "vllm:time_to_first_token_seconds_sum": 0.75,
    "vllm:inter_token_latency_seconds_count": 1,
    "vllm:inter_token_latency_seconds_sum": 0.125,
    "vllm:request_time_per_output_token_seconds_count": 1,
    "vllm:request_time_per_output_token_seconds_sum": 1.0,
    "vllm:e2e_request_latency_seconds_count": 1,
    "vllm:e2e_request_latency_seconds_sum": 7.0,
    "vllm:request_queue_time_seconds_count": 1,
    "vllm:request_queue_time_seconds_sum": 1.0,
    "vllm:request_inference_time_seconds_count": 1,
    "vllm:request_inference_time_seconds_sum": 6.0,
    "vllm:request_prefill_time_seconds_count": 1,
    "vllm:request_prefill_time_seconds_sum": 2.0,
    "vllm:request_decode_time_seconds_count": 1,
    "vllm:request_decode_time_seconds_sum": 4.0,
    "vllm:request_prompt_tokens_count": 1,
    "vllm:request_prompt_tokens_sum": 30,
    "vllm:request_generation_tokens_count": 1,
    "vllm:request_generation_tokens_sum": 5,
    "vllm:request_params_max_tokens_count": 1,
    "vllm:request_params_max_tokens_sum": 60,
    "vllm:request_num_preemptions_count": 1,
    "vllm:request_num_preemptions_sum": 2,
    "vllm:iteration_tokens_total_count": 1,
    "vllm:iteration_tokens_total_sum": 105,
    "quire:preemptions_total mode=recompute": 7,
    "quire:preemptions_total mode=swap": 2,
    "quire:computed_tokens_total": 105,
    "quire:recomputed_tokens_total": 21,
    "quire:restored_tokens_total": 48,
    "quire:host_written_bytes_total": 4096,
    "quire:host_read_bytes_total": 2048,
    "quire:spilled_blocks_total": 7,
    "quire:failed_copies_total": 1,
    "quire:host_tier_usage_perc": 0.25,
    "quire:host_tier_blocks": 20,
    "quire:host_tier_pinned_blocks": 6,
    "quire:empty_slots": 13,
    "quire:copies_in_flight": 2,
    "quire:preemption_stall_seconds_count": 4,
    "quire:preemption_stall_seconds_sum": 3.25,
    "quire:preemption_cost_ratio_count mode=swap": 1,
    "quire:preemption_cost_ratio_sum mode=swap": 2.0,
    "quire:preemption_cost_ratio_count mode=recompute": 2,
    "quire:preemption_cost_ratio_sum mode=recompute": 1.75,
}


def samples(metrics: EngineMetrics, *, types: tuple[str, ...] = ()) -> dict[str, float]:
    """Each sample by its name and the labels beside the replica's own, creation times left out.

    Args:
        types: those of the families to look at; empty for all but the info.
    """
    found: dict[str, float] = {}
    for family in metrics.collect():
        if family.type not in types and (types or family.type == "info"):
            continue
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("a-model", "r1")
            if not sample.name.endswith("_created"):
                key = " ".join([sample.name, *(f"{k}={v}" for k, v in labels.items())])
                assert key not in found
                found[key] = sample.value
    return found


@pytest.fixture
def metrics() -> EngineMetrics:
    """Of a replica that has done nothing."""
    return EngineMetrics("a-model", "r1", INFO)


def test_a_step_is_told_whole_and_in_the_right_places(metrics: EngineMetrics) -> None:
    metrics.observe(OUTCOME, SNAPSHOT, STATS)
    found = samples(metrics)
    assert {key: value for key, value in found.items() if "_bucket" not in key} == SAMPLES


def test_the_shape_of_the_pool_and_of_the_host_tier(metrics: EngineMetrics) -> None:
    (info,) = (family for family in metrics.collect() if family.type == "info")
    (sample,) = info.samples
    assert sample.name == "vllm:cache_config_info"
    assert sample.labels == {
        "model_name": "a-model",
        "engine": "r1",
        "block_size": "16",
        "num_gpu_blocks": "40",
        "host_blocks": "80",
        "cache_dtype": "float32",
    }


def test_every_name_is_there_before_the_first_step(metrics: EngineMetrics) -> None:
    found = samples(metrics)
    assert set(SAMPLES) <= set(found)
    assert not any(found.values())


def test_good_predictions_and_bad_ones_fall_apart(metrics: EngineMetrics) -> None:
    ratios = (0.05, 0.85, 0.95, 1.05, 1.15, 20.0)
    resumed = tuple(ResumeCost(("a", 0), False, ratio, 1.0, 0.0) for ratio in ratios)
    metrics.observe(StepOutcome(resumed=resumed), SNAPSHOT, STATS)
    found = samples(metrics)
    name = "quire:preemption_cost_ratio_bucket mode=recompute le="
    bounds = [key.removeprefix(name) for key in found if key.startswith(name)]
    assert (bounds[0], bounds[-2]) == ("0.1", "10.0")
    at_most = {bound: found[name + bound] for bound in ("0.1", "0.9", "1.0", "1.1", "10.0")}
    assert at_most == {"0.1": 1, "0.9": 2, "1.0": 3, "1.1": 4, "10.0": 5}


def test_a_replica_without_a_host_tier_uses_none_of_it() -> None:
    metrics = EngineMetrics("a-model", "r1", dataclasses.replace(INFO, host_blocks=0))
    metrics.observe(OUTCOME, ReplicaSnapshot(running=1), STATS)
    assert samples(metrics)["quire:host_tier_usage_perc"] == 0.0


def test_counters_only_grow(metrics: EngineMetrics) -> None:
    growing = ("counter", "histogram")
    metrics.observe(OUTCOME, SNAPSHOT, STATS)
    before = samples(metrics, types=growing)
    later = dataclasses.replace(STATS, preemptions=10, computed_tokens=106)
    quiet = StepOutcome(first_token_s=(0.125,))
    metrics.observe(quiet, ReplicaSnapshot(), later)
    after = samples(metrics, types=growing)
    grown = {key: after[key] - value for key, value in before.items() if after[key] != value}
    assert after.keys() == before.keys()
    assert min(grown.values()) > 0
    assert {key: value for key, value in grown.items() if "_bucket" not in key} == {
        "vllm:num_preemptions_total": 1,
        "quire:preemptions_total mode=recompute": 1,
        "quire:computed_tokens_total": 1,
        "vllm:iteration_tokens_total_count": 1,
        "vllm:iteration_tokens_total_sum": 1,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:time_to_first_token_seconds_sum": 0.125,
    }


def test_families_travel(metrics: EngineMetrics) -> None:
    metrics.observe(OUTCOME, SNAPSHOT, STATS)
    families = metrics.collect()
    assert pickle.loads(pickle.dumps(families)) == families


def test_a_preemption_that_was_cut_short_has_a_stall_but_no_ratio(metrics: EngineMetrics) -> None:
    cut = ResumeCost(("a", 0), False, 8.0, 1.0, stall_s=3.0, caught_up=False)
    metrics.observe(StepOutcome(resumed=(cut,)), SNAPSHOT, STATS)
    found = samples(metrics)
    assert found["quire:preemption_cost_ratio_count mode=recompute"] == 0
    assert found["quire:preemption_stall_seconds_sum"] == 3.0
