"""`ray.serve.llm`'s PrefixCacheAffinityRouter, unchanged, before our replicas."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
from ray import cloudpickle

from replicas.protocol import GenerateRequest

_PACKAGE = "ray.llm._internal.serve.routing_policies.prefix_aware"
_FIRST_CHARACTER = 0x10000
"""Beyond the surrogates, so that every token id is a character."""


def _load() -> type[Any]:
    """The class out of its file. Its packages would import vLLM or SGLang, which the router has
    no use for, so they are entered without being run."""
    folder, name = Path(ray.__file__).parent, "ray"
    for part in _PACKAGE.split(".")[1:]:
        folder, name = folder / part, f"{name}.{part}"
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(folder)]
            sys.modules[name] = package
    tree = importlib.import_module(f"{_PACKAGE}.prefix_tree")
    # The actor's process could not import it.
    cloudpickle.register_pickle_by_value(tree)
    found: type[Any] = importlib.import_module(
        f"{_PACKAGE}.prefix_aware_router"
    ).PrefixCacheAffinityRouter
    return found


class AffinityRouter(_load()):  # type: ignore[misc]
    """Reads our requests: a character for a token."""

    def _extract_text_from_request(self, pending_request: Any) -> str:
        request: GenerateRequest = pending_request.args[0]
        return "".join(chr(_FIRST_CHARACTER + token) for token in request.prompt_token_ids)
