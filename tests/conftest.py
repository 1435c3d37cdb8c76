"""Settings that all tests share."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import settings

# A busy box must not fail a test, and continuous integration must see the same tests each time.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def all_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _torch_threads(request: pytest.FixtureRequest) -> None:
    """Small tensors gain nothing from more threads; tests that need no torch do not load it."""
    torch = sys.modules.get("torch")
    wanted = all_cores() if request.node.get_closest_marker("all_cores") else 1
    if torch is not None and torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The real cluster comes last: it runs no longer than its tests need, and beside no others."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)
