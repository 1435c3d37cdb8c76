"""An HTTP server as a subprocess."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HOST = "127.0.0.1"
_STOP_S = 60.0
_POLL_S = 0.2
_LOG_TAIL = 2000


class ServerError(RuntimeError):
    """It did not start, or did not stop; the message ends with what it printed last."""


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(
    command: Sequence[str],
    url: str,
    log: Path,
    start_s: float,
    env: dict[str, str] | None = None,
) -> Iterator[None]:
    """Runs `command` until `url`/health answers; in the end stops it with SIGTERM and waits.

    Raises:
        ServerError: it ended by itself, was not ready in time, or would not stop.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=log.parent,
            env=env,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, url, log, start_s)
        yield
    finally:
        _stop(process, log)


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, log: Path, start_s: float
) -> None:
    deadline = time.monotonic() + start_s
    while not _answers(f"{url}/health"):
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode}: {_tail(log)}")
        if time.monotonic() > deadline:
            raise ServerError(f"the server was not ready within {start_s:g} s: {_tail(log)}")
        time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:  # nobody listens yet, or answers with an error
        return False


def _stop(process: subprocess.Popen[bytes], log: Path) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)  # its children with it
        process.wait()
        raise ServerError(f"the server did not stop within {_STOP_S:g} s: {_tail(log)}") from error


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:].strip()
