"""Models that many tests share: loading them takes longer than most tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # most tests here need no transformers
    from replicas.models.hf_adapter import PagedModel
    from tests.replicas.engine.tiny_models import Twin


@pytest.fixture(params=[1, 2], ids=["one step", "two in flight"])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Steps in flight of each engine that `make_engine` is not told otherwise."""
    from tests.replicas.engine import driver

    steps: int = request.param
    monkeypatch.setattr(driver, "DEPTH", steps)
    return steps


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """A random Llama of two layers."""
    from tests.replicas.engine.tiny_models import make_twin

    return make_twin(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def embedded() -> PagedModel:
    """The model that comes with Quire, in float32."""
    import torch

    from replicas.models.loader import load
    from replicas.models.sources import EMBEDDED, resolve

    torch.set_num_threads(1)
    return load(resolve(EMBEDDED), "float32", "cpu")
