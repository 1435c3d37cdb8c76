"""Loads a model's folder and makes it ready to serve."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from replicas.models import dry_run, module_swap
from replicas.models.architectures import architecture_name, check_architecture
from replicas.models.errors import UnsupportedArchitectureError
from replicas.models.fingerprint import content_digest
from replicas.models.heap import keep_freed_memory
from replicas.models.hf_adapter import ATTENTION, PagedModel
from replicas.models.native_bf16 import has_native_bf16
from replicas.models.sources import check_hf_kernels_absent, read_config
from replicas.models.spec import ModelSpec

_logger = logging.getLogger(__name__)


def load(path: Path, dtype: str, device: str) -> PagedModel:
    """The model in the folder `path`, on `device` (`cpu` or `cuda`).

    `dtype` is `float32`, `bfloat16`, or `auto`: bfloat16 where the machine is fast at it.

    Raises:
        ModelSourceError: the folder has no readable config.json.
        UnsupportedArchitectureError: the model would be served wrongly.
        PackageClashError: PyPI's `kernels` is installed.
    """
    check_hf_kernels_absent()
    check_architecture(read_config(path))
    model = _read(path, resolve_dtype(dtype, device), device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    module_swap.swap(model)
    shapes = dry_run.inspect(model)
    spec = ModelSpec(
        architecture=type(model).__name__,
        num_layers=shapes.num_layers,
        num_heads=shapes.num_heads,
        kv_heads=shapes.kv_heads,
        head_dim=max(shapes.key_dim, shapes.value_dim),
        vocab_size=shapes.vocab_size,
        max_position=_max_position(model.config.get_text_config()),
        eos_token_ids=_eos_token_ids(model),
        dtype=str(model.dtype).removeprefix("torch."),
        fingerprint=_fingerprint(path),
        num_parameters=num_parameters,
    )
    if device == "cpu":
        keep_freed_memory()  # only now, when what loading took is back with the system
    _logger.info("loaded %s", spec)
    return PagedModel(model, spec)


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """The torch dtype that `auto`, `float32` or `bfloat16` stands for on `device`."""
    if name == "float32" or (name == "auto" and not has_native_bf16(device)):
        return torch.float32
    return torch.bfloat16


def _read(path: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    hf_logging.disable_progress_bar()  # a second's work, drawn into the replica's log
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=ATTENTION, local_files_only=True
        )
    except KeyError as error:
        if error.args != (ATTENTION,):
            raise
        # The class looks its attention up in a table of its own.
        name = architecture_name(read_config(path))
        raise UnsupportedArchitectureError(
            f"{name} is not supported: its attention does not go through the attention interface"
        ) from error
    ready: PreTrainedModel = model.eval().requires_grad_(False).to(device)
    return ready


def _max_position(config: PreTrainedConfig) -> int:
    limit: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope] if "rope_type" in rope else rope.values():
        if parameters and parameters["rope_type"] == "longrope":
            # Beyond the original length all positions of a batch would turn by other factors,
            # those of short requests beside a long one included.
            limit = min(limit, parameters["original_max_position_embeddings"])
    return limit


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Of the generation configuration and the model's, without repeats."""
    found: dict[int, None] = {}
    for config in (model.generation_config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        listed: Iterable[int] = () if ids is None else ids if isinstance(ids, list) else (ids,)
        found.update(dict.fromkeys(listed))
    return tuple(found)


def _fingerprint(path: Path) -> str:
    """Of config.json and the weights; a snapshot of the hub is in a folder named by its commit."""
    return content_digest([path / "config.json", *path.glob("*.safetensors")])
