"""Freed memory is used again without page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource
from replicas.models.heap import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        b"x" * (40 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

default = faults()
kept = keep_freed_memory()
faults()
print(default, kept, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_large_buffers_are_reused() -> None:
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    default, kept, after = done.stdout.split()
    if kept == "False":
        pytest.skip("not glibc")
    assert int(default) > 1000
    assert int(after) < 100
