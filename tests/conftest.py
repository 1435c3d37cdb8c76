"""Settings that all tests share."""

from __future__ import annotations

import sys

import pytest
from hypothesis import settings

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("dev")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Small tensors gain nothing from more threads; tests that need no torch do not load it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
