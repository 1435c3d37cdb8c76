"""Who computes: torch or Triton."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import dispatch
from kernels.attention_batch import AttentionBatch
from kernels.dispatch import KernelBackendError, paged_attention
from kernels.fp8 import FP8
from kernels.head_transform import HeadTransform
from tests.kernels.attention_case import AttentionCase


class Gpu:
    """A machine with an NVIDIA GPU and Triton, unless told otherwise."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.present, self.capability, self.triton = True, (9, 0), True
        patch.setattr(torch.cuda, "is_available", lambda: self.present)
        patch.setattr(torch.cuda, "get_device_capability", lambda _device: self.capability)
        patch.setattr(dispatch.util, "find_spec", lambda _name: object() if self.triton else None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_auto_takes_triton_wherever_it_can_run(gpu: Gpu) -> None:
    assert dispatch.backend("auto", "cuda") == dispatch.backend("auto", "cuda:1") == "triton"
    assert dispatch.backend("auto", "cpu") == "torch"
    gpu.triton = False
    assert dispatch.backend("auto", "cuda") == "torch"


def test_what_is_asked_for_is_what_runs(gpu: Gpu) -> None:
    assert dispatch.backend("triton", "cuda") == "triton"
    assert dispatch.backend("torch", "cuda") == dispatch.backend("torch", "cpu") == "torch"


def test_triton_without_a_gpu_is_a_clear_error(gpu: Gpu) -> None:
    with pytest.raises(
        KernelBackendError,
        match="kernel_backend 'triton' needs an NVIDIA GPU, and this replica runs on 'cpu'; "
        "allowed here: 'auto' or 'torch'",
    ):
        dispatch.backend("triton", "cpu")
    gpu.present = False
    with pytest.raises(KernelBackendError, match="needs an NVIDIA GPU, and torch finds none"):
        dispatch.backend("triton", "cuda")
    gpu.present, gpu.triton = True, False
    with pytest.raises(KernelBackendError, match="needs the package triton"):
        dispatch.backend("triton", "cuda")


@pytest.mark.parametrize(
    ("capability", "fits"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((10, 0), True)]
)
def test_fp8_needs_a_gpu_that_converts_it(
    gpu: Gpu, capability: tuple[int, int], fits: bool
) -> None:
    gpu.capability = capability
    dispatch.check_fp8("torch", "cuda")
    if fits:
        dispatch.check_fp8("triton", "cuda")
        return
    with pytest.raises(KernelBackendError, match=r"compute capability 8\.9, and this one has 8\."):
        dispatch.check_fp8("triton", "cuda")


class Triton:
    """What stands in for Triton's kernels: it notes the calls, and lists or refuses a variant."""

    def __init__(
        self, patch: pytest.MonkeyPatch, *, listed: bool = True, checks: bool = False
    ) -> None:
        self.calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.listed = listed
        attention, writing, variants = map(
            ModuleType, ("kernels.gpu.attention", "kernels.gpu.kv_write", "kernels.variants")
        )
        attention.attend = self._note("attend", "mixed")  # type: ignore[attr-defined]
        writing.kv_write = self._note("kv_write", "rotated")  # type: ignore[attr-defined]
        variants.Layer = SimpleNamespace(of=self._note("layer", "a layer"))  # type: ignore[attr-defined]
        variants.require_layer = self._require  # type: ignore[attr-defined]
        variants.checks = lambda _device: checks  # type: ignore[attr-defined]
        for module in (attention, writing, variants):
            patch.setitem(sys.modules, module.__name__, module)

    def _note(self, name: str, result: str) -> Any:
        def function(*args: Any, **options: Any) -> str:
            self.calls[name] = (args, options)
            return result

        return function

    def _require(self, layer: str) -> None:
        assert layer == "a layer"
        if not self.listed:
            raise ValueError("not listed")


STEP: Any = SimpleNamespace(slots="slots", sizes=SimpleNamespace(tile_tokens=32))


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("transformed", [True, False])
def test_a_step_of_device_tensors_goes_to_tritons_kernels(
    monkeypatch: pytest.MonkeyPatch, fp8: bool, transformed: bool
) -> None:
    """They write first and attend with the query that writing has transformed; every option gets
    there."""
    triton = Triton(monkeypatch)
    given = AttentionCase([(3, 1)], value_dim=8, has_sinks=True).build()
    dtype = FP8 if fp8 else torch.float32
    blocks = torch.zeros(3, 2, 16, 16, dtype=dtype), torch.zeros(3, 2, 16, 16, dtype=dtype)
    scales = {name: torch.ones(2) if fp8 else None for name in ("k_scale", "v_scale")}
    heads = HeadTransform(*torch.rand(4, 1, 16), norm_eps=1e-6) if transformed else None
    masking: dict[str, Any] = {"scale": 0.5, "window": 7, "soft_cap": 3.0, "sinks": given.sinks}
    new = (given.query, given.key, given.value)
    found: Any = paged_attention(*new, *blocks, STEP, **masking, **scales, heads=heads)

    assert found == "mixed"
    expected = heads or HeadTransform()
    assert triton.calls["kv_write"] == (
        (*new, *blocks, "slots"),
        {
            "cos": expected.cos,
            "sin": expected.sin,
            "q_norm": expected.q_norm,
            "k_norm": expected.k_norm,
            "eps": expected.norm_eps,
            **scales,
        },
    )
    (query, keys, values, step), options = triton.calls["attend"]
    assert (query, keys, step) == ("rotated", blocks[0], STEP)
    assert options == {**masking, **scales}
    # As wide as the model's values are, within wider slots.
    assert (values.shape, values.stride()) == ((3, 2, 16, 8), blocks[1].stride())
    assert values.data_ptr() == blocks[1].data_ptr()


@pytest.mark.parametrize("listed", [True, False])
def test_a_gpu_computes_what_is_listed_and_refuses_the_rest(
    monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    triton = Triton(monkeypatch, listed=listed, checks=True)
    new = torch.zeros(3, 1, 2, 16).unbind()
    blocks = torch.zeros(3, 2, 16, 16)

    def run() -> None:
        paged_attention(*new, blocks, blocks, STEP, scale=0.5, window=7)

    if listed:
        run()
    else:
        with pytest.raises(ValueError, match="not listed"):
            run()
    assert ("kv_write" in triton.calls) == listed
    *asked, keys, params, heads, tile_tokens = triton.calls["layer"][0]
    assert all(one is other for one, other in zip(asked, new, strict=True))
    assert keys is blocks
    assert (params.scale, params.window, heads, tile_tokens) == (0.5, 7, HeadTransform(), 32)


def test_torch_transforms_heads_first() -> None:
    """The same as handing over what is transformed already."""
    case = AttentionCase([(0, 5), (0, 1), (0, 1)])
    given, expected = case.build(), case.build()
    heads = HeadTransform(*torch.rand(2, 7, 16), *torch.rand(2, 16), norm_eps=1e-6)
    query, key = heads.apply(given.query, given.key)

    def run(problem: Any, query: Any, key: Any, **options: Any) -> torch.Tensor:
        batch = AttentionBatch.build(problem.segments, 16, "cpu")
        pool = (problem.key_blocks, problem.value_blocks)
        return paged_attention(query, key, problem.value, *pool, batch, scale=0.25, **options)

    ours = run(given, given.query, given.key, heads=heads)
    assert torch.equal(ours, run(expected, query, key))
    assert torch.equal(given.key_blocks, expected.key_blocks)
    assert not torch.equal(ours, run(case.build(), given.query, given.key))


def test_a_cpu_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import kernels.dispatch\n"
        "assert not any(name.startswith('kernels.gpu.') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
