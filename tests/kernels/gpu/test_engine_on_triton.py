"""Steps computed by the kernels themselves, in Triton's interpreter, are those of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kernels.elementwise import Elementwise, TorchElementwise
from kernels.gpu.block_moves import TritonBlockMoves
from kernels.gpu.elementwise import TritonElementwise
from kernels.gpu.launch import Launch
from replicas.core.sampling_params import SamplingParams
from replicas.core.scheduler_output import (
    PENDING,
    Draw,
    SampledToken,
    ScheduledChoice,
    SchedulerOutput,
)
from replicas.engine.device_runner import DeviceRunner
from replicas.engine.device_sampler import TritonSampler
from replicas.engine.in_flight import Runner
from replicas.engine.kv_pool import KVPool
from replicas.engine.model_runner import ModelRunner
from replicas.engine.step_planner import TritonPlanner
from replicas.models import loader, module_swap
from replicas.models.hf_adapter import ATTENTION, PagedModel
from replicas.protocol import TokenLogprobs
from tests.replicas.engine.driver import assert_close
from tests.replicas.engine.fake_device import FakeDevice

SETTINGS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
WINDOWED = {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}
MODELS: dict[str, tuple[dict[str, object], Elementwise]] = {
    "qwen3": (WINDOWED, TorchElementwise()),
    "llama": ({"num_hidden_layers": 1}, TritonElementwise()),
    "gpt2": ({"num_hidden_layers": 1}, TorchElementwise()),  # its modules stay as they are
}
EVERYWHERE = {
    *("kv_write", "attn_decode", "attn_merge", "attn_prefill", "block_copy", "edit_scores"),
    *(f"sample_{step}" for step in ("peaks", "bins", "interval", "candidates", "threshold")),
    *("sample_race", "sample_pick"),
}
GREEDY = SamplingParams(9, 0, temperature=0.0, logprobs=1)
SAMPLED = SamplingParams(
    9, 1, temperature=0.8, top_p=0.95, min_p=0.01, repetition_penalty=1.2, logit_bias=((4, 2.0),)
)
BLOCK_SIZE = 16
TABLES = [(1, 4), (2,), (3,)]
POOL: dict[str, Any] = {
    "num_blocks": 4,
    "block_size": BLOCK_SIZE,
    "dtype": torch.float32,
    "device": "cpu",
}


class GpuPool(KVPool):
    """A pool on the CPU that lies as on a GPU."""

    def __init__(self, model: PagedModel) -> None:
        spec = model.spec
        super().__init__(spec, **POOL)
        shape = (self.num_blocks + 1, spec.num_layers, 2, spec.kv_heads, BLOCK_SIZE)
        self._memory = torch.full((*shape, spec.head_dim), float("nan"))
        self._memory[0] = 0

    @property
    def blocks(self) -> Tensor:
        return self._memory

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._memory[:, index, 0], self._memory[:, index, 1]


def make_model(model_type: str, overrides: dict[str, object]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SETTINGS | overrides))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model.eval().requires_grad_(False)


def chunk(
    index: int, start: int, tokens: Sequence[int], sampling: SamplingParams, known: Sequence[int]
) -> ScheduledChoice:
    return ScheduledChoice(
        key=("", index),
        epoch=0,
        start=start,
        token_ids=tokens,
        blocks=TABLES[index],
        sampling=sampling,
        prompt_token_ids=known,
        draws=(Draw(("", index), output_index=0, output_token_ids=()),),
    )


def steps(long: Sequence[int], short: Sequence[int]) -> list[SchedulerOutput]:
    """A prefill, one beside a decoding choice, decodes in and out of graphs, a copied block."""
    one, other = len(long), len(short)
    end = one + 1
    parts = [
        [chunk(0, 0, long, GREEDY, long)],
        [chunk(1, 0, short, SAMPLED, short), chunk(0, one, [PENDING], GREEDY, long)],
        [chunk(0, end, [PENDING], GREEDY, long), chunk(1, other, [7], SAMPLED, short)],
        [chunk(2, other, [7], SAMPLED, short)],
    ]
    copies = [(), (), (), ((2, 3),)]
    return [
        SchedulerOutput(tuple(items), pairs, num_preempted=0)
        for items, pairs in zip(parts, copies, strict=True)
    ]


def on_kernels(model: PagedModel, device: FakeDevice) -> DeviceRunner:
    pool = GpuPool(model)
    planner = TritonPlanner(
        model.spec,
        block_size=BLOCK_SIZE,
        kv_dtype=pool.dtype,
        max_blocks=2,
        device=torch.device("cpu"),
    )
    sampler = TritonSampler(model.spec.vocab_size, model.spec.eos_token_ids, device.name)
    runner = DeviceRunner(model, pool, planner, sampler, TritonBlockMoves(), device)
    runner.capture(2)
    return runner


@pytest.mark.parametrize("model_type", MODELS)
def test_tokens_and_logprobs_are_those_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    overrides, ops = MODELS[model_type]
    plain = loader.prepare(make_model(model_type, overrides), "", "cpu")
    fused = make_model(model_type, overrides)
    module_swap.swap_for_gpu(fused, ops)
    model, device = loader.describe(fused, "", 0), FakeDevice()
    cpu: Runner = ModelRunner(plain, KVPool(plain.spec, **POOL), "cpu")
    gpu = on_kernels(model, device)
    launched = launches(monkeypatch)
    for step in steps((5, 9, 40, 3, 77, 21, 8, 90, 11, 12, 13, 2, 60, 61, 62), (50, 51, 52)):
        expected, actual = cpu.launch(step).result(), gpu.launch(step).result()
        assert actual.sampled.keys() == expected.sampled.keys()
        for key, token in expected.sampled.items():
            assert actual.sampled[key].token_id == token.token_id
            assert_close(logprobs(actual.sampled[key]), logprobs(token))
    assert device.replays == 2
    assert launched >= EVERYWHERE
    if model_type == "llama":
        assert launched >= {"rms_norm", "silu_mul"}, "all of its modules are the kernels'"


def launches(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The ops that are launched from now on."""
    seen: set[str] = set()
    launch = Launch.__call__

    def noted(self: Launch, grid: tuple[int, ...], **arguments: Any) -> None:
        seen.add(self.op)
        launch(self, grid, **arguments)

    monkeypatch.setattr(Launch, "__call__", noted)
    return seen


def logprobs(token: SampledToken) -> list[TokenLogprobs]:
    return [] if token.logprobs is None else [token.logprobs]
