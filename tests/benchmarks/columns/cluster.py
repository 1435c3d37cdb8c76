"""Our whole cluster over HTTP: `quire serve` with one replica on all threads."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from tests.benchmarks import client, server
from tests.benchmarks.measure import Serve, measure
from tests.benchmarks.plan import Plan, Say

_MODEL = "bench"
_START_S = 300.0


def serve_config(plan: Plan) -> dict[str, Any]:
    """A Serve config with the defaults, but for what the plan says."""
    args = {
        "model": {"source": str(plan.folder), "dtype": plan.dtype, "served_name": _MODEL},
        "replicas": {"count": 1, "threads": plan.threads},
    }
    application = {"name": "quire", "import_path": "cluster.app:build", "args": args}
    return {
        "proxy_location": "HeadOnly",
        "applications": [{**application, "route_prefix": "/"}],
    }


@contextmanager
def start(plan: Plan) -> Iterator[Serve]:
    config, port = plan.scratch / "cluster.yaml", server.free_port()
    config.write_text(yaml.safe_dump(serve_config(plan)), encoding="utf-8")
    command = [sys.executable, "-m", "cluster.cli", "serve", "--config", str(config)]
    command += ["--host", server.HOST, "--port", str(port)]
    url = f"http://{server.HOST}:{port}"
    with server.running(command, url, plan.scratch / "cluster.log", _START_S):
        yield functools.partial(client.drive, url, _MODEL)


def report(plan: Plan, say: Say) -> dict[str, Any]:
    return measure(start, plan, say)
