"""`quire serve`: runs a Serve config in the foreground until it is told to stop."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import ray
from ray import serve
from ray.serve._private.api import serve_start
from ray.serve._private.client import ServeControllerClient
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from cluster.config_errors import ConfigError
from cluster.serve_config import load_serve_config
from replicas.models import sources
from replicas.models.errors import PackageClashError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
_LOOPBACK = ("127.0.0.1", "localhost")
_POLL_S = 0.2
_FAILURE = 1


def run(config_path: Path, host: str | None, port: int | None) -> int:
    """Start a local Ray cluster with the config's application; returns the exit status.

    Everything that can be refused before a model is loaded is refused first.

    Raises:
        ConfigError: the config, the port or the model's source is refused.
    """
    document, config = load_serve_config(config_path)
    http = document.setdefault("http_options", {})
    http["host"] = host or http.get("host", DEFAULT_HOST)
    http["port"] = port or http.get("port", DEFAULT_PORT)
    _check_port(http["host"], http["port"])
    try:
        sources.check_hf_kernels_absent()
        sources.resolve(config.model.source, config.model.revision, progress=_say)
    except (ValueError, PackageClashError) as error:
        raise ConfigError([str(error)]) from error

    _say(f"starting Ray and {config.model.source} ...")
    ray.init(
        address="local",
        namespace="serve",
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
        # Ray's own ports stay on loopback too, unless the API is to be reached from elsewhere.
        _node_ip_address="127.0.0.1" if http["host"] in _LOOPBACK else None,
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, which sets its own
        signal.signal(number, lambda _number, _frame: stop.set())
    try:
        return _serve(ServeDeploySchema.model_validate(document), stop)
    finally:
        _say("stopping ...")
        serve.shutdown()
        ray.shutdown()
        _say("stopped")


def _serve(schema: ServeDeploySchema, stop: threading.Event) -> int:
    client = serve_start(
        http_options=schema.http_options.model_dump(), proxy_location=schema.proxy_location
    )
    client.deploy_apps(schema)
    app = schema.applications[0].name
    if not _wait_until_running(client, app, stop):
        return 0 if stop.is_set() else _FAILURE
    client.wait_for_proxies_serving(wait_for_applications_running=True)
    summary = serve.get_app_handle(app).summary.remote().result()
    http = schema.http_options
    _say(f"ready: http://{http.host}:{http.port}/v1 serves {summary}")
    stop.wait()
    return 0


def _wait_until_running(client: ServeControllerClient, app: str, stop: threading.Event) -> bool:
    started, reported = time.monotonic(), ""
    while not stop.wait(_POLL_S):
        statuses = [s for s in client.list_serve_statuses() if s.name == app]
        if not statuses:
            continue
        status = statuses[0]
        if status.app_status.status is ApplicationStatus.RUNNING:
            return True
        if status.app_status.status is ApplicationStatus.DEPLOY_FAILED:
            _say(f"failed to start: {_last_line(status.app_status.message)}")
            return False
        progress = ", ".join(
            f"{d.name} {d.status.value.lower()}" for d in status.deployment_statuses
        )
        if progress != reported:
            _say(f"{time.monotonic() - started:4.0f} s: {progress or 'building'}")
            reported = progress
    return False


def _last_line(message: str) -> str:
    """The error of a Python traceback inside `message`."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def _check_port(host: str, port: int) -> None:
    """Serve would retry for a long time before it gives a taken port up."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError([f"cannot listen on {host}:{port}: {error.strerror}"]) from error


def _say(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr, flush=True)
