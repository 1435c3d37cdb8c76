"""The list of kernel variants, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.model_shapes import MODELS, HeadNorm, ModelShape
from tests.kernels.aot.compiling import source_of

if TYPE_CHECKING:
    from kernels.variants import Layer

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def layer(**changes: object) -> Layer:
    """One of Llama 3.1 8B."""
    from kernels.variants import Layer

    shape = Layer(
        heads=32,
        kv_heads=8,
        head_dim=128,
        value_dim=128,
        block_size=64,
        dtype=BF16,
        pool_dtype=BF16,
        arch=90,
        rot_dim=128,
        rope_dtype=BF16,
    )
    return replace(shape, **changes)


def test_the_list_is_the_same_each_time_and_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import triton

    from kernels import variants

    def compiled(*arguments: object, **options: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(triton, "compile", compiled)
    keys = [variants.identity(launch) for launch in variants.variants(90)]
    variants._by_identity.cache_clear()
    assert keys == [variants.identity(launch) for launch in variants.variants(90)]
    assert len(keys) == len(set(keys)) > 200


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_launches_give_every_argument_of_their_kernel(arch: int) -> None:
    from kernels.variants import variants

    for launch in variants(arch):
        given = [*launch.types, *launch.constants]
        assert sorted(given) == sorted(launch.kernel.arg_names), launch.op


NORMS = {HeadNorm.NONE: None, HeadNorm.MODEL: BF16, HeadNorm.FLOAT32: torch.float32}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.models.partition(",")[0])
def test_every_model_is_served_with_any_block_size_and_pool(model: ModelShape) -> None:
    from kernels.variants import require_layer

    shape = layer(
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        value_dim=model.value_dim or model.head_dim,
        rot_dim=model.rot_dim,
        rope_dtype=BF16 if model.rot_dim else None,
        norm_dtype=NORMS[model.head_norm],
        sinks_dtype=BF16 if model.sinks else None,
        capped=model.capped,
    )
    unfused = replace(shape, rot_dim=0, rope_dtype=None, norm_dtype=None)
    for block_size, pool_dtype in product((16, 32, 64, 128), (BF16, FP8)):
        for windowed in model.windows:
            pool = {"block_size": block_size, "pool_dtype": pool_dtype, "windowed": windowed}
            require_layer(replace(shape, **pool))
            require_layer(replace(unfused, **pool))


def test_what_differs_in_numbers_alone_is_one_variant() -> None:
    from kernels.variants import identity, require_layer

    def keys(shape: Layer) -> list[str]:
        return [identity(launch) for launch in shape.launches()]

    usual = layer()
    assert keys(usual) == keys(layer(heads=12, kv_heads=3))  # as many a group
    assert keys(usual) == keys(layer(heads=64, kv_heads=8))  # a power of two, too
    assert keys(usual) == keys(layer(block_size=128))
    assert keys(usual) != keys(layer(heads=24, kv_heads=8))  # some rows are left over
    assert keys(usual) != keys(layer(heads=8, kv_heads=8))  # one head, nothing to divide by
    assert keys(usual) != keys(layer(block_size=32))
    require_layer(layer(heads=22, kv_heads=2))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_dim": 72, "value_dim": 72, "rot_dim": 72}, "DIM=72"),
        ({"heads": 16, "windowed": True, "capped": True, "sinks_dtype": BF16}, "sinks=.bf16"),
        ({"sinks_dtype": torch.float32}, "sinks=.fp32"),
        ({"dtype": torch.float32, "pool_dtype": torch.float32}, "fp32"),
        ({"dtype": torch.float16, "pool_dtype": torch.float16}, "fp16"),
        ({"rot_dim": 100}, "ROT_DIM=100"),
        ({"norm_dtype": torch.float16}, "norm=.fp16"),
        ({"block_size": 256}, "block_size 256"),
        ({"head_dim": 320, "value_dim": 320}, "320"),
        ({"pool_dtype": torch.float16}, "the pool is torch.float16"),
    ],
)
def test_what_is_not_listed_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    from kernels.variants import VariantError, require_layer

    with pytest.raises(VariantError, match=named):
        require_layer(layer(**changes))


def test_a_refusal_says_what_to_do() -> None:
    from kernels.variants import VariantError, require_layer

    with pytest.raises(VariantError, match="kernel_backend 'torch'"):
        require_layer(layer(rot_dim=100))


def test_what_is_compiled_is_checked_and_what_is_interpreted_is_not() -> None:
    from kernels.gpu import rms_norm
    from kernels.variants import VariantError, checks, require_all

    assert checks(torch.device("cuda"))
    assert checks(torch.device("cuda:1"))
    assert not checks(torch.device("cpu"))
    tiny = rms_norm.launch(
        dtype=torch.float32,
        weight_dtype=torch.float32,
        width=24,
        x_stride=24,
        residual_stride=None,
        rounded=True,
    )
    require_all([tiny], torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
        with pytest.raises(VariantError, match="rms_norm is not listed"):
            require_all([tiny], torch.device("cuda"))


def test_fp8_is_refused_before_compute_capability_8_9() -> None:
    from kernels.variants import VariantError, require_layer, variants

    require_layer(layer(pool_dtype=FP8))
    with pytest.raises(VariantError, match=r"fp8 .* 8\.9"):
        require_layer(layer(pool_dtype=FP8, arch=80))
    kinds = {kind for launch in variants(80) for kind in launch.types.values()}
    assert "*fp8e4nv" not in kinds
    assert "*fp8e4nv" in {kind for launch in variants(90) for kind in launch.types.values()}


@pytest.mark.parametrize("width", [576, 960, 2048, 2560, 3584, 5120, 8192, 16384])
def test_rows_of_any_width_up_to_the_widest_are_listed(width: int) -> None:
    from kernels.gpu import rms_norm
    from kernels.variants import VariantError, require

    def norm(width: int, dtype: torch.dtype) -> object:
        return rms_norm.launch(
            dtype=dtype,
            weight_dtype=dtype,
            width=width,
            x_stride=width,
            residual_stride=None,
            rounded=True,
        )

    require(norm(width, BF16), 90)
    with pytest.raises(VariantError, match="BLOCK=32768"):
        require(norm(20_000, BF16), 90)
    with pytest.raises(VariantError, match=r"x=\*fp32"):
        require(norm(width, torch.float32), 90)


@pytest.mark.parametrize(
    "vocab_size", [32_000, 32_004, 49_152, 50_257, 128_256, 151_936, 200_019, 262_144]
)
def test_any_vocabulary_is_listed(vocab_size: int) -> None:
    from kernels.gpu import allow_only, edit_scores, sample
    from kernels.variants import require

    require(allow_only.launch(vocab_size=vocab_size), 90)
    require(edit_scores.launch(vocab_size=vocab_size), 90)
    for launch in sample.launches(vocab_size):
        require(launch, 90)


def kernel(*, specialised: bool) -> SimpleNamespace:
    """As much of a jit function as says what a call compiles."""
    counted = SimpleNamespace(name="n", do_not_specialize=not specialised)
    return SimpleNamespace(arg_names=["x", "n"], params=[counted])


def test_a_launch_that_a_call_would_compile_anew_is_refused() -> None:
    from kernels.gpu.launch import Launch

    types = {"x": "*bf16", "n": "i32"}
    with pytest.raises(ValueError, match=r"\['n'\] are compiled anew"):
        source_of(Launch("op", kernel(specialised=True), types, {}, 4), aligned=True)
    with pytest.raises(ValueError, match=r"\['m'\]"):
        source_of(Launch("op", kernel(specialised=False), types, {"m": 1}, 4), aligned=True)
