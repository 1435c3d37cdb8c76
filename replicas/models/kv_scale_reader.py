"""KV scales out of a checkpoint that was quantised with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from replicas.models.kv_scales import KVScaleError, KVScales
from replicas.models.sources import read_config
from replicas.models.spec import ModelSpec

_PARTS = {
    "k_scale": "k",
    "attn.k_scale": "k",
    "k_proj.k_scale": "k",
    "k_proj.output_scale": "k",
    "v_scale": "v",
    "attn.v_scale": "v",
    "v_proj.v_scale": "v",
    "v_proj.output_scale": "v",
    "kv_scale": "kv",
}
"""A tensor's name within a layer's attention -> what it scales: as compressed-tensors, ModelOpt,
Quark and AutoFP8 write them."""

_NAME = re.compile(r"(?:.*\.)?(?:layers|h)\.(\d+)\.(?:self_attn|attention|attn)\.(.+)")

Found = dict[tuple[str, int], tuple[str, Tensor]]
"""("k" or "v", layer) -> (the tensor's name, its elements in float32)."""


def read(folder: Path, spec: ModelSpec) -> KVScales | None:
    """The scales in the folder's *.safetensors; None where there is none.

    A tensor has one element for its whole layer, or one for each kv head.

    Raises:
        KVScaleError: a layer has no scale, or two, or there is no such layer; a tensor has
            another number of elements; a scale is not positive and finite; or the scales
            are said to be of another format than 8-bit floats.
    """
    found = _find(folder)
    if not found:
        return None
    _check_scheme(read_config(folder))
    layers = {layer for _, layer in found}
    if max(layers) >= spec.num_layers:
        name, _ = next(found[key] for key in found if key[1] == max(layers))
        raise KVScaleError(f"{name}: the model has layers 0 to {spec.num_layers - 1}")
    return KVScales(_stack(found, "k", spec), _stack(found, "v", spec))


def _find(folder: Path) -> Found:
    found: Found = {}
    for name, elements in _tensors(folder):
        match = _NAME.fullmatch(name)
        assert match is not None
        for part in _PARTS[match[2]]:
            key = (part, int(match[1]))
            if key in found:
                raise KVScaleError(f"{name} and {found[key][0]} are scales of the same")
            found[key] = (name, elements)
    return found


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                match = _NAME.fullmatch(name)
                if match is not None and match[2] in _PARTS:
                    yield name, file.get_tensor(name).to(torch.float32).flatten()


def _stack(found: Found, part: str, spec: ModelSpec) -> Tensor:
    """[layers, kv_heads]"""
    missing = [layer for layer in range(spec.num_layers) if (part, layer) not in found]
    if missing:
        raise KVScaleError(
            f"{part}_scale: the checkpoint has it for {spec.num_layers - len(missing)} of "
            f"{spec.num_layers} layers, and not for layer {missing[0]}"
        )
    rows = []
    for layer in range(spec.num_layers):
        name, elements = found[part, layer]
        if len(elements) not in (1, spec.kv_heads):
            raise KVScaleError(
                f"{name} has {len(elements)} elements: a layer has one scale, or one for each of "
                f"its {spec.kv_heads} kv heads"
            )
        rows.append(elements.expand(spec.kv_heads))
    return torch.stack(rows)


def _check_scheme(config: Mapping[str, Any]) -> None:
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return
    said = (scheme.get("type", "float"), scheme.get("num_bits", 8))
    if said != ("float", 8):
        raise KVScaleError(
            f"quantization_config.kv_cache_scheme says {said[1]}-bit {said[0]}: fp8 takes the "
            f"scales of 8-bit floats"
        )
