"""Fixtures of the HTTP front's tests."""

from __future__ import annotations

import pytest

from cluster.tokenizer import Tokenizer
from replicas.models.sources import resolve


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The embedded model's tokenizer: byte-level, special tokens 0..16."""
    return Tokenizer.load(resolve("embedded"))
