"""What an engine does where there is a GPU, as far as that can be seen without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kernels import dispatch
from replicas.config import EngineConfig
from replicas.engine import cuda_memory, device_side
from replicas.engine.device_memory import DeviceMemory
from replicas.engine.device_runner import DeviceRunner
from replicas.engine.device_side import CpuSide, GpuSide
from replicas.engine.kv_format import KVFormat
from replicas.engine.kv_pool import KVPool
from replicas.engine.model_runner import ModelRunner
from replicas.models.hf_adapter import PagedModel
from tests.replicas.engine.fake_device import FakeDevice, fake_runner
from tests.replicas.engine.tiny_models import Twin

KV = KVFormat(torch.float32)


def config(**values: Any) -> EngineConfig:
    settings = {"block_size": 8, "max_num_seqs": 3, "max_num_batched_tokens": 20}
    return EngineConfig(**(settings | values))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Runners for Triton's kernels are made over it."""
    device = FakeDevice()

    def make(model: PagedModel, pool: KVPool, max_model_len: int) -> DeviceRunner:
        return fake_runner(model, device)(pool, max_model_len)

    monkeypatch.setattr(device_side, "triton_runner", make)
    monkeypatch.setattr(dispatch, "backend", lambda asked, device: "triton")
    return device


def refuse(model: PagedModel, pool: KVPool, max_model_len: int) -> DeviceRunner:
    raise ValueError("head_dim 17 is no multiple of 8")


def some_pool(llama: Twin) -> KVPool:
    return KVPool(llama.paged.spec, num_blocks=9, block_size=8, dtype=torch.float32, device="cpu")


def test_a_cpu_has_its_own_side(llama: Twin) -> None:
    side = device_side.choose(config(), llama.paged, KV, "cpu")
    assert isinstance(side, CpuSide)
    assert side.measure is None
    assert isinstance(side.runner(some_pool(llama), 64), ModelRunner)


def test_graphs_are_captured_for_as_many_choices_as_may_run(llama: Twin, gpu: FakeDevice) -> None:
    side = GpuSide(config(), llama.paged, KV, "cpu")
    assert gpu.graphs == []
    assert isinstance(side.runner(some_pool(llama), 64), DeviceRunner)
    assert len(gpu.graphs) == len((1, 2, 4))


def test_shapes_that_kernels_do_not_take_go_to_torch(llama, gpu, monkeypatch, caplog) -> None:
    monkeypatch.setattr(device_side, "triton_runner", refuse)
    side = GpuSide(config(), llama.paged, KV, "cpu")
    assert isinstance(side.runner(some_pool(llama), 64), ModelRunner)
    assert "torch's kernels are used, which are slower: head_dim 17" in caplog.text


def test_shapes_that_kernels_do_not_take_are_refused_where_they_are_asked_for(
    llama, gpu, monkeypatch
) -> None:
    monkeypatch.setattr(device_side, "triton_runner", refuse)
    with pytest.raises(ValueError, match="head_dim 17"):
        GpuSide(config(kernel_backend="triton"), llama.paged, KV, "cpu")


def test_measuring_runs_the_largest_steps(llama, gpu, monkeypatch) -> None:
    ran = []
    launch = DeviceRunner.launch

    def noting(runner: DeviceRunner, output):
        ran.append(output.num_tokens)
        return launch(runner, output)

    def measure(steps: Sequence[Callable[[], None]]) -> DeviceMemory:
        for step in steps:
            step()
        return DeviceMemory(1, 1, 1, 1)

    side = GpuSide(config(), llama.paged, KV, "cpu")
    monkeypatch.setattr(DeviceRunner, "launch", noting)
    monkeypatch.setattr(device_side, "measure", measure)
    side.measure()
    assert ran == [20, 4], "all tokens of a step, all rows of the largest graph"


class FakeCuda:
    """Memory of 1,000 bytes: 100 are allocated, 40 others', and steps reserve more for a while."""

    def __init__(self, peaks: Sequence[int]) -> None:
        self._peaks = list(peaks)
        self.peak = self.reserved = 130

    def step(self) -> None:
        self.peak = self._peaks.pop(0)
        self.reserved = self.peak

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def empty_cache(self) -> None:
        self.reserved = 110

    def memory_allocated(self) -> int:
        return 100

    def memory_reserved(self) -> int:
        return self.reserved

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.reserved

    def max_memory_reserved(self) -> int:
        return self.peak

    def mem_get_info(self) -> tuple[int, int]:
        return 1000 - self.reserved - 40, 1000


def test_activations_are_what_steps_reserve_beside_the_weights(monkeypatch) -> None:
    cuda = FakeCuda(peaks=[400, 150])
    monkeypatch.setattr(cuda_memory.torch, "cuda", cuda)
    memory = cuda_memory.measure([cuda.step, cuda.step])
    assert memory == DeviceMemory(1000, weights=100, activations=300 + 50, others=40)
    assert memory.room(1.0) == 1000 - 100 - 350 - 40
