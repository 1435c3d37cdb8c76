"""The roofline, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler_output import Draw, ScheduledChoice, SchedulerOutput
from router.simulator.hardware import HARDWARE, Hardware
from router.simulator.machine import Machine
from router.simulator.models import MODELS, ModelShape

# 2 layers; per layer 2*8*8 (queries, output) + 2*8*4 (keys, values) + 3*8*16 = 576 parameters.
TINY = ModelShape("tiny", 2, 8, 2, 1, 4, 16, 10, 100)
UNIT = Hardware(
    "unit",
    peak_flops=2.0,
    memory_bytes=1e6,
    bandwidth=4.0,
    host_bandwidth=8.0,
    flops_share=0.5,
    bandwidth_share=0.25,
    overhead_s=3.0,
)
"""One operation and one byte a second."""


def item(start: int, count: int, *, draws: bool) -> ScheduledChoice:
    key = (f"{start}", 0)
    return ScheduledChoice(
        key=key,
        epoch=0,
        start=start,
        token_ids=(0,) * count,
        blocks=(),
        sampling=SamplingParams(max_tokens=1, seed=0),
        prompt_token_ids=(),
        draws=(Draw(key, 0, ()),) if draws else (),
    )


def output(*items: ScheduledChoice) -> SchedulerOutput:
    return SchedulerOutput(scheduled=items, block_copies=(), num_preempted=0)


def test_sizes_of_a_model() -> None:
    assert TINY.layer_parameters == 2 * 576
    assert TINY.layer_bytes == 4 * 576
    assert TINY.head_bytes == 2 * 8 * 10
    assert TINY.weight_bytes == 4 * 576 + 2 * 160
    assert TINY.kv_bytes == 2 * 2 * 1 * 4 * 2, "keys and values, layers, heads, head_dim, bytes"


def test_a_prefill_is_bound_by_operations() -> None:
    # 3 tokens after 5: pairs 6 + 7 + 8 = 21.
    linear = 2 * (3 * 1152 + 80)
    attention = 4 * 2 * 4 * 2 * 21
    assert linear + attention > 2304 + 160 + 32 * (8 + 3)
    step = output(item(5, 3, draws=True))
    assert Machine(TINY, UNIT).step_s(step) == linear + attention + 3.0


def test_a_decode_is_bound_by_bytes() -> None:
    # Two choices read 1000 and 2000 tokens of KV beside the weights, and write one each.
    slow = Machine(TINY, replace(UNIT, peak_flops=1e9))
    step = output(item(999, 1, draws=True), item(1999, 1, draws=True))
    assert slow.step_s(step) == 2304 + 160 + 32 * (1000 + 2000 + 2) + 3.0


def test_a_chunk_without_a_draw_leaves_the_logits_out() -> None:
    step = output(item(0, 2, draws=False))
    assert Machine(TINY, UNIT).step_s(step) == 2 * 2 * 1152 + 4 * 2 * 4 * 2 * 3 + 3.0


def test_devices_share_the_work() -> None:
    step = output(item(5, 3, draws=True))
    alone, together = Machine(TINY, UNIT).step_s(step), Machine(TINY, UNIT, 4).step_s(step)
    assert together - 3.0 == pytest.approx((alone - 3.0) / 4)


def test_a_step_without_tokens_takes_no_time() -> None:
    assert Machine(TINY, UNIT).step_s(output()) == 0.0


def test_the_published_models_have_their_size() -> None:
    assert MODELS["llama-3.1-8b"].weight_bytes / 2 == pytest.approx(8.03e9, rel=0.001)
    assert MODELS["llama-3.1-70b"].weight_bytes / 2 == pytest.approx(70.55e9, rel=0.001)
    assert MODELS["llama-3.1-8b"].kv_bytes == 131_072


@pytest.mark.parametrize(
    ("model", "gpu", "degree"),
    [
        ("llama-3.1-8b", "a100", 1),
        ("llama-3.1-8b", "h100", 1),
        ("llama-3.1-8b", "cpu", 1),
        ("llama-3.1-70b", "a100", 4),
        ("llama-3.1-70b", "h100", 4),
        ("llama-3.1-70b", "h200", 2),
        ("llama-3.1-70b", "cpu", 2),
    ],
)
def test_a_replica_spans_as_many_devices_as_it_needs(model: str, gpu: str, degree: int) -> None:
    machine = Machine.fitting(MODELS[model], HARDWARE[gpu])
    assert machine.degree == degree
    room = degree * machine.hardware.memory_bytes * 0.9 - machine.model.weight_bytes
    assert machine.kv_tokens == int(room // machine.model.kv_bytes)
    assert machine.kv_tokens >= machine.model.max_position


def test_the_host_tier_is_counted_in_whole_blocks() -> None:
    machine = Machine(MODELS["llama-3.1-8b"], HARDWARE["h100"])
    assert machine.block_bytes(512) == 2**26
    assert machine.host_blocks(1.0, 512) == 16
    assert machine.host_blocks(0.0, 512) == 0
    assert machine.host_blocks(0.05, 512) == 0


def test_rates_are_those_of_a_prefill() -> None:
    rates = Machine(MODELS["llama-3.1-8b"], HARDWARE["a100"]).rates()
    assert 9_000 < rates.prefill_tokens < 11_500, "the usual figure for this pair"
    assert rates.written_bytes == rates.read_bytes == 25e9
