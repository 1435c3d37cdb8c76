"""Loads a model's folder and makes it ready to serve."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from kernels import dispatch
from kernels.dispatch import KernelBackend
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


def load(path: Path, dtype: str, device: str, kernel_backend: KernelBackend = "auto") -> PagedModel:
    """The model in the folder `path`, on `device` (`cpu` or `cuda`).

    `dtype` is `float32`, `bfloat16`, or `auto`: bfloat16 where the machine is fast at it.
    `kernel_backend` says whose kernels its modules are built from, on a GPU.

    Raises:
        ModelSourceError: the folder has no readable config.json.
        UnsupportedArchitectureError: the model would be served wrongly.
        PackageClashError: PyPI's `kernels` is installed.
        KernelBackendError: the kernels asked for cannot run here.
    """
    check_hf_kernels_absent()
    dispatch.backend(kernel_backend, device)  # refused now, not after the weights are read
    check_architecture(read_config(path))
    model = _read(path, resolve_dtype(dtype, device), device)
    return prepare(model, _fingerprint(path), device, kernel_backend, folder=path)


def from_config(
    config: PreTrainedConfig,
    dtype: str,
    device: str,
    kernel_backend: KernelBackend = "auto",
    *,
    seed: int = 0,
) -> PagedModel:
    """A model with random weights, made on `device`: to measure with, no checkpoint is needed.

    Raises what `load` raises.
    """
    check_hf_kernels_absent()
    check_architecture(config.to_dict())
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=resolve_dtype(dtype, device), attn_implementation=ATTENTION
        )
    fingerprint = hashlib.blake2b(
        f"{config.to_json_string()} {seed}".encode(), digest_size=16
    ).hexdigest()
    return prepare(model.eval().requires_grad_(False), fingerprint, device, kernel_backend)


def prepare(
    model: PreTrainedModel,
    fingerprint: str,
    device: str,
    kernel_backend: KernelBackend = "auto",
    *,
    folder: Path | None = None,
) -> PagedModel:
    """A model that is on `device`, with our attention, made ready to serve: modules are replaced
    in place, and a dry run proves that it fits.

    `fingerprint` is the spec's; `folder` is where its checkpoint lies, if it has one.

    Raises:
        UnsupportedArchitectureError: the model would be served wrongly.
        KernelBackendError: the kernels asked for cannot run here.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    backend = dispatch.backend(kernel_backend, device)
    if device == "cpu":
        module_swap.swap_for_cpu(model)
    else:
        module_swap.swap_for_gpu(model, dispatch.elementwise(backend))
    ready = describe(model, fingerprint, num_parameters, folder)
    if device == "cpu":
        keep_freed_memory()  # only now, when what loading took is back with the system
    _logger.info("loaded %s", ready.spec)
    return ready


def describe(
    model: PreTrainedModel, fingerprint: str, num_parameters: int, folder: Path | None = None
) -> PagedModel:
    """A model as it is, with what the engine knows of it, after a dry run that proves that it fits.

    Raises:
        UnsupportedArchitectureError: the model would be served wrongly.
    """
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
        fingerprint=fingerprint,
        num_parameters=num_parameters,
        windows=shapes.windows,
    )
    return PagedModel(model, spec, folder)


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """The torch dtype that `auto`, `float32` or `bfloat16` stands for on `device`."""
    if name == "float32" or (name == "auto" and not has_native_bf16(device)):
        return torch.float32
    return torch.bfloat16


def _read(path: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    hf_logging.disable_progress_bar()  # a second's work, drawn into the replica's log
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if _quantises_kv_only(config):
        del config.quantization_config  # else transformers wants the library that wrote it
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
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


def _quantises_kv_only(config: PreTrainedConfig) -> bool:
    """Whether a checkpoint has plain weights, and scales of KV beside them."""
    quantisation = getattr(config, "quantization_config", None)
    return (
        isinstance(quantisation, dict)
        and bool(quantisation.get("kv_cache_scheme"))
        and not quantisation.get("config_groups")
    )


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
