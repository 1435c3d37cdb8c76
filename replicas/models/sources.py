"""From what the operator names to a local folder with a model in it; torch stays unloaded."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from replicas.models.architectures import check_architecture
from replicas.models.errors import ModelSourceError, PackageClashError, first_line

EMBEDDED = "embedded"
"""The source that stands for the model that comes with Quire."""

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_HUB_SKIPPED = ("*/*", "consolidated*.safetensors")
"""Folders hold other formats, `consolidated` files the same weights under other names."""

Progress = Callable[[str], None]

_logger = logging.getLogger(__name__)


def resolve(source: str, revision: str | None = None, *, progress: Progress = _logger.info) -> Path:
    """The local folder of a model: config.json, tokenizer files and *.safetensors.

    `source` is `embedded`, a local folder, a .gguf file or a Hugging Face id, of which
    `revision` names a branch, tag or commit. What is fetched or converted is kept for the
    next start; `progress` gets a line about work that takes long.

    Raises:
        ModelSourceError: there is no such model, or no way to get it.
        UnsupportedArchitectureError: its configuration tells that it cannot be served.
    """
    path = Path(source).expanduser()
    on_hub = not (source == EMBEDDED or path.exists() or _looks_like_path(source))
    if on_hub:
        folder = _fetch(source, revision, progress)
    elif revision is not None:
        raise ModelSourceError(f"{source} takes no revision: only Hugging Face ids do")
    elif source == EMBEDDED:
        from replicas.models.embedded import locate
        from replicas.models.gguf_conversion import convert

        folder = convert(locate(), progress=progress)
    elif path.suffix == ".gguf":
        from replicas.models.gguf_conversion import convert

        if not path.is_file():
            raise ModelSourceError(f"no such file: {source}")
        folder = convert(path, progress=progress)
    else:
        folder = path
    _check_folder(folder, source)
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json. Raises ModelSourceError where it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{folder / 'config.json'} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelSourceError(f"{folder / 'config.json'} does not hold a configuration")
    return config


def check_hf_kernels_absent() -> None:
    """Raise PackageClashError where PyPI's `kernels` is installed.

    It occupies our own package of that name, and transformers would take ours for it.
    """
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise PackageClashError(
        f"the PyPI package kernels {version} clashes with Quire's own: pip uninstall kernels"
    )


def _looks_like_path(source: str) -> bool:
    return source.startswith(("/", ".", "~")) or source.endswith(".gguf")


def _check_folder(folder: Path, source: str) -> None:
    if not folder.exists():
        raise ModelSourceError(f"no such folder: {source}")
    if not folder.is_dir():
        raise ModelSourceError(f"neither a folder nor a .gguf file: {source}")
    if not (folder / "config.json").is_file():
        raise ModelSourceError(f"no config.json in {source}")
    if next(folder.glob("*.safetensors"), None) is None:
        raise ModelSourceError(f"no *.safetensors weights in {source}")
    check_architecture(read_config(folder))


def _fetch(source: str, revision: str | None, progress: Progress) -> Path:
    """A snapshot of a Hugging Face id, from its cache where the hub cannot be reached."""
    if _HUB_ID.fullmatch(source) is None:
        raise ModelSourceError(f"neither a folder, a file nor a Hugging Face id: {source}")
    # The configuration first: gigabytes of an unsupported model would come for nothing.
    folder = _snapshot(source, revision, ("config.json",))
    if (folder / "config.json").is_file():
        check_architecture(read_config(folder))
    progress(f"fetching {source} from the Hugging Face hub, or taking it from its cache")
    return _snapshot(source, revision, _HUB_FILES)


def _snapshot(source: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    at = "" if revision is None else f" at revision {revision}"
    try:
        folder = snapshot_download(
            source,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_HUB_SKIPPED),
        )
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise ModelSourceError(f"cannot fetch {source}{at} from the hub: {reason}") from error
    return Path(folder)
