"""vLLM's OpenAI server, with the same client as ours."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.benchmarks import client, server
from tests.benchmarks.measure import NotInstalledError, Serve, measure
from tests.benchmarks.plan import Plan, Say

_MODEL = "bench"
_KV_GIB = 2
_START_S = 1200.0
"""It compiles the model first."""


@contextmanager
def start(plan: Plan) -> Iterator[Serve]:
    if importlib.util.find_spec("vllm") is None:
        raise NotInstalledError("vllm")
    port = server.free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(plan.folder), "--served-model-name", _MODEL, "--dtype", plan.dtype]
    command += ["--host", server.HOST, "--port", str(port), "--max-num-seqs", "64"]
    cores = sorted(os.sched_getaffinity(0))[: plan.threads]
    env = {
        **os.environ,
        # By itself it would leave a core to the server.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
    }
    url = f"http://{server.HOST}:{port}"
    with server.running(command, url, plan.scratch / "vllm.log", _START_S, env):
        yield functools.partial(client.drive, url, _MODEL)


def report(plan: Plan, say: Say) -> dict[str, Any]:
    return measure(start, plan, say)
