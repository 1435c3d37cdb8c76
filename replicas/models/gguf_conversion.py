"""From a .gguf file to a folder of safetensors, once, in the user's cache.

Loading a .gguf file takes about a minute for a small model, the folder a second. Weights are
kept as float32: a quantised weight is a product and a sum of 16-bit floats, which bfloat16
would round, and a bfloat16 model loads from it as fast.
"""

from __future__ import annotations

import logging
import mmap
import shutil
import struct
import time
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from replicas.models.architectures import check_architecture
from replicas.models.errors import ModelSourceError, UnsupportedArchitectureError, first_line
from replicas.models.fingerprint import content_digest

_FORMAT = 1
"""Part of the folder's name: raise it when what a conversion writes changes."""
_LOCK_TIMEOUT_S = 1800.0
_STRING = 8
"""The type of a string in .gguf metadata."""
_DIGIT_SPLITTERS = frozenset(
    {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
)
"""Values of `tokenizer.ggml.pre` whose vocabularies were learnt with single digits."""

_logger = logging.getLogger(__name__)


def convert(
    source: Path, *, cache: Path | None = None, progress: Callable[[str], None] = _logger.info
) -> Path:
    """The converted folder of `source`, made now if it is not in `cache` yet.

    The folder appears whole or not at all. Processes that ask at the same time wait for the
    one that converts; the lock of one that died is released by the operating system.

    Raises:
        ModelSourceError: the file cannot be converted, or the cache not be written.
        UnsupportedArchitectureError: its configuration tells that it cannot be served.
    """
    models = (user_cache_path("quire") if cache is None else cache) / "models"
    name = folder_name(source)
    target, partial = models / name, models / f".{name}.partial"
    if target.is_dir():
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f".{name}.lock", timeout=_LOCK_TIMEOUT_S):
            shutil.rmtree(partial, ignore_errors=True)  # of one that was killed
            if not target.is_dir():
                try:
                    _convert(source, partial, progress)
                    partial.rename(target)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except Timeout as error:
        raise ModelSourceError(
            f"another process has been converting {source.name} for "
            f"{_LOCK_TIMEOUT_S / 60:.0f} minutes"
        ) from error
    except OSError as error:
        reason = first_line(error)
        raise ModelSourceError(f"cannot convert {source} into {models}: {reason}") from error
    return target


def folder_name(source: Path) -> str:
    """What the converted folder of `source` is called: equal for equal contents."""
    return f"{source.stem}-{content_digest([source])}-v{_FORMAT}"


def _convert(source: Path, folder: Path, progress: Callable[[str], None]) -> None:
    missing = [name for name in ("accelerate", "gguf") if util.find_spec(name) is None]
    if missing:
        raise ModelSourceError(
            f"converting {source.name} takes {' and '.join(missing)}: pip install 'quire[embedded]'"
        )
    progress(f"converting {source.name} for the first start (about a minute for a small model)")
    started = time.monotonic()
    try:
        _write(source, folder)
    except (ValueError, NotImplementedError) as error:
        if isinstance(error, UnsupportedArchitectureError):
            raise
        raise ModelSourceError(f"cannot convert {source}: {first_line(error)}") from error
    progress(f"converted {source.name} in {time.monotonic() - started:.0f} s: {folder.parent}")


def _write(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(source.parent),
        "gguf_file": source.name,
        "local_files_only": True,
    }
    config = AutoConfig.from_pretrained(**place)
    check_architecture(config.to_dict())
    model: Any = AutoModelForCausalLM.from_pretrained(**place, config=config, dtype=torch.float32)
    # What is saved is plain float32: the marks of the quantised file would be taken for true.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    tokenizer.model_max_length = config.max_position_embeddings
    if _pre_tokenizer(source) in _DIGIT_SPLITTERS:
        tokenizer.backend_tokenizer.pre_tokenizer = _split_digits()
    tokenizer.save_pretrained(folder)


def _split_digits() -> Any:
    """transformers splits numbers as GPT-2 does, which also parts the blanks before them."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


def _pre_tokenizer(source: Path) -> str | None:
    """The value of `tokenizer.ggml.pre`, without parsing the metadata, which takes seconds."""
    key = b"tokenizer.ggml.pre"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<I", _STRING)
    with (
        source.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        found = data.find(entry)
        if found < 0:
            return None
        start = found + len(entry)
        (length,) = struct.unpack_from("<Q", data, start)
        return data[start + 8 : start + 8 + length].decode()
