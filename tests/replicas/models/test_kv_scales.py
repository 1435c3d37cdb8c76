"""KV scales: read from a checkpoint, or calibrated; bad ones are refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from kernels.fp8 import FP8_MAX
from replicas.models import kv_calibration, kv_scale_reader
from replicas.models.hf_adapter import PagedModel
from replicas.models.kv_calibration import MARGIN, calibrate
from replicas.models.kv_scales import KVScaleError, KVScales
from replicas.models.loader import load
from replicas.models.spec import ModelSpec

LAYERS, HEADS = 3, 2
SPEC = ModelSpec(
    architecture="TestForCausalLM",
    num_layers=LAYERS,
    num_heads=4,
    kv_heads=HEADS,
    head_dim=8,
    vocab_size=10,
    max_position=64,
    eos_token_ids=(),
    dtype="float32",
    fingerprint="",
    num_parameters=0,
)
Elements = float | Sequence[Any]

Tiny = Callable[..., tuple[PreTrainedModel, Path]]


def checkpoint(
    folder: Path, tensors: Mapping[str, Elements], scheme: Mapping[str, Any] | None = None
) -> Path:
    config = {} if scheme is None else {"quantization_config": {"kv_cache_scheme": scheme}}
    (folder / "config.json").write_text(json.dumps(config))
    named = {name: torch.tensor(elements) for name, elements in tensors.items()}
    named["model.layers.0.self_attn.k_proj.weight"] = torch.ones(2, 2)
    # In two files, as large checkpoints are.
    names = sorted(named)
    save_file({name: named[name] for name in names[::2]}, folder / "model-1.safetensors")
    save_file({name: named[name] for name in names[1::2]}, folder / "model-2.safetensors")
    return folder


def named(
    k: str = "k_scale", v: str = "v_scale", layers: int = LAYERS, attention: str = "self_attn"
) -> dict[str, Elements]:
    """A scale of its own for each layer, of keys and of values."""
    return {
        f"model.layers.{layer}.{attention}.{name}": 0.25 + layer + shift
        for layer in range(layers)
        for name, shift in ((k, 0.0), (v, 0.5))
    }


KEYS = torch.tensor([[0.25, 0.25], [1.25, 1.25], [2.25, 2.25]])


def refusal(folder: Path) -> str:
    with pytest.raises(KVScaleError) as caught:
        kv_scale_reader.read(folder, SPEC)
    return str(caught.value)


@pytest.mark.parametrize(
    "tensors",
    [
        named(),
        named(attention="attn"),
        named("attn.k_scale", "attn.v_scale"),
        named("k_proj.k_scale", "v_proj.v_scale"),
        named("k_proj.output_scale", "v_proj.output_scale"),
        {name: [scale] for name, scale in named().items()},
        {name: [[[scale]], [[scale]]] for name, scale in named().items()},
    ],
)
def test_every_usual_name_and_shape_is_read(tmp_path: Path, tensors: dict[str, Elements]) -> None:
    scales = kv_scale_reader.read(checkpoint(tmp_path, tensors), SPEC)
    assert scales is not None
    assert torch.equal(scales.keys, KEYS)
    assert torch.equal(scales.values, KEYS + 0.5)


def test_heads_may_have_their_own(tmp_path: Path) -> None:
    tensors = {name: [scale, 8.0] for name, scale in named().items()}
    scales = kv_scale_reader.read(checkpoint(tmp_path, tensors), SPEC)
    assert scales is not None
    k_scale, v_scale = scales.layer(1)
    assert (k_scale.tolist(), v_scale.tolist()) == ([1.25, 8.0], [1.75, 8.0])


def test_one_scale_may_serve_keys_and_values(tmp_path: Path) -> None:
    tensors = {f"model.layers.{n}.self_attn.kv_scale": 1.0 + n for n in range(LAYERS)}
    scales = kv_scale_reader.read(checkpoint(tmp_path, tensors), SPEC)
    assert scales is not None
    assert torch.equal(scales.keys, scales.values)
    assert scales.keys[:, 0].tolist() == [1.0, 2.0, 3.0]


def test_a_checkpoint_without_scales_has_none(tmp_path: Path) -> None:
    others = {
        "model.layers.0.self_attn.q_scale": 1.0,
        "model.layers.0.self_attn.k_proj.weight_scale": 1.0,
        "model.layers.0.mlp.k_scale": 1.0,
    }
    assert kv_scale_reader.read(checkpoint(tmp_path, others), SPEC) is None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [(0.0, "0"), (-0.02, "-0.02"), (math.nan, "nan"), (math.inf, "inf")],
)
def test_a_scale_is_positive_and_finite(tmp_path: Path, wrong: float, says: str) -> None:
    """O25."""
    tensors = named() | {"model.layers.1.self_attn.v_scale": [1.0, wrong]}
    said = refusal(checkpoint(tmp_path, tensors))
    assert said == f"v_scale of layer 1, kv head 1 is {says}: a scale is positive and finite"


def test_a_layer_without_is_named(tmp_path: Path) -> None:
    """O25: wrong layer count."""
    tensors = named()
    del tensors["model.layers.1.self_attn.v_scale"]
    said = refusal(checkpoint(tmp_path, tensors))
    assert said == "v_scale: the checkpoint has it for 2 of 3 layers, and not for layer 1"


def test_keys_alone_are_not_enough(tmp_path: Path) -> None:
    tensors = {name: scale for name, scale in named().items() if name.endswith("k_scale")}
    assert "v_scale: the checkpoint has it for 0 of 3 layers" in refusal(
        checkpoint(tmp_path, tensors)
    )


def test_a_layer_too_many_is_named(tmp_path: Path) -> None:
    said = refusal(checkpoint(tmp_path, named(layers=LAYERS + 1)))
    assert said.startswith("model.layers.3.self_attn.")
    assert said.endswith("_scale: the model has layers 0 to 2")


def test_another_number_of_heads_is_named(tmp_path: Path) -> None:
    tensors = named() | {"model.layers.2.self_attn.k_scale": [1.0, 1.0, 1.0]}
    assert refusal(checkpoint(tmp_path, tensors)) == (
        "model.layers.2.self_attn.k_scale has 3 elements: a layer has one scale, or one for each "
        "of its 2 kv heads"
    )


def test_two_scales_for_the_same_are_refused(tmp_path: Path) -> None:
    tensors = named() | {"model.layers.2.self_attn.k_proj.output_scale": 1.0}
    said = refusal(checkpoint(tmp_path, tensors))
    assert "model.layers.2.self_attn.k_proj.output_scale" in said
    assert "model.layers.2.self_attn.k_scale" in said
    assert "scales of the same" in said


def test_scales_of_integers_are_refused(tmp_path: Path) -> None:
    fits = {"num_bits": 8, "type": "float", "symmetric": True}
    assert kv_scale_reader.read(checkpoint(tmp_path, named(), fits), SPEC) is not None
    for changed in ({"type": "int"}, {"num_bits": 4}):
        said = refusal(checkpoint(tmp_path, named(), fits | changed))
        assert said.startswith("quantization_config.kv_cache_scheme says ")


def test_a_checkpoint_whose_kv_alone_is_quantised_loads(tiny: Tiny) -> None:
    _, folder = tiny("llama")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder, "float32", "cpu")
    assert kv_scale_reader.read(folder, model.spec) is None


def test_digests_are_of_the_scales_alone() -> None:
    keys, values = torch.rand(LAYERS, HEADS) + 0.5, torch.rand(LAYERS, HEADS) + 0.5
    digest = KVScales(keys, values).digest
    assert KVScales(keys.clone(), values.clone()).to("cpu").digest == digest
    nudged = keys.clone()
    nudged[2, 1] = nudged[2, 1].nextafter(torch.tensor(9.0))
    assert len({digest, KVScales(nudged, values).digest, KVScales(values, keys).digest}) == 3


def stored(model: PagedModel) -> Tensor:
    """[layers, 2, kv_heads] the greatest magnitudes of what calibration stores."""
    pools: list[Any] = []

    class Pool(kv_calibration._Pool):
        def __init__(self, model: PagedModel) -> None:
            super().__init__(model)
            pools.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_calibration, "_Pool", Pool)
        calibrate(model)
    magnitudes: Tensor = pools[0].memory.abs().amax(dim=(2, 4, 5))
    return magnitudes


@pytest.mark.parametrize("options", [{}, {"max_position_embeddings": 24}])
def test_calibration_leaves_room_above_the_greatest(tiny: Tiny, options: dict[str, Any]) -> None:
    _, folder = tiny("llama", **options)
    model = load(folder, "float32", "cpu")
    scales = calibrate(model)
    both = torch.stack((scales.keys, scales.values), 1)
    headroom = both * FP8_MAX / stored(model)
    assert headroom.min() >= MARGIN
    assert headroom.max() < 2 * MARGIN, "a scale twice as small would do"
    assert torch.equal(torch.frexp(both).mantissa, torch.full_like(both, 0.5)), "powers of two"
    assert calibrate(model).digest == scales.digest


def test_heads_and_layers_are_calibrated_apart(tiny: Tiny) -> None:
    _, folder = tiny("llama")
    model = load(folder, "float32", "cpu")
    before = calibrate(model)
    name = "model.layers.1.self_attn.v_proj.weight"
    path = folder / "model.safetensors"
    tensors = load_file(path)
    dim = model.spec.head_dim
    tensors[name][dim : 2 * dim] *= 16
    save_file(tensors, path, metadata={"format": "pt"})
    after = calibrate(load(folder, "float32", "cpu"))
    assert torch.equal(after.keys, before.keys)
    changed = after.values / before.values
    assert changed[1, 1] == 16
    changed[1, 1] = 1
    assert torch.equal(changed, torch.ones_like(changed))


def test_values_that_are_always_zero_get_a_scale() -> None:
    assert kv_calibration._powers_of_two(torch.tensor([0.0, 1.0, 1.001, 0.25])).tolist() == [
        1.0,
        1.0,
        2.0,
        0.25,
    ]


def test_a_model_that_stores_nan_is_refused(tiny: Tiny) -> None:
    model = load(tiny("llama")[1], "float32", "cpu")
    broken = torch.nn.Parameter(torch.full((101, 32), math.nan), requires_grad=False)
    model._model.get_input_embeddings().weight = broken
    with pytest.raises(KVScaleError, match="keys or values are not finite"):
        calibrate(model)
