"""What the engine does without."""

from __future__ import annotations

import subprocess
import sys

BARE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "triton"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
import torch
import replicas.engine.async_engine
import replicas.engine.device_side
import replicas.models.loader
from kernels import dispatch

assert dispatch.backend("auto", "cpu") == "torch"
dispatch.elementwise("torch"), dispatch.block_moves("torch")
assert not torch.cuda.is_initialized()
print(sorted({name.partition(".")[0] for name in sys.modules} & {"ray", "triton"}))
"""


def test_the_engine_needs_neither_ray_nor_triton_nor_a_gpu() -> None:
    run = subprocess.run(
        [sys.executable, "-c", BARE], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "[]\n"
