"""How many steps are in flight."""

from __future__ import annotations

import pytest

from tests.replicas.core import harness


@pytest.fixture(params=[1, 2], ids=["one step", "two in flight"])
def depth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Of each `Replica` that is not told otherwise."""
    steps: int = request.param
    monkeypatch.setattr(harness, "DEPTH", steps)
    return steps
