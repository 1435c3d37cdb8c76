"""A real cluster in a subprocess, on loopback, stopped by pid."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
BIN = Path(sys.executable).parent
MODEL = "embedded"

READY_S = 240.0
"""Far above what an idle machine needs: tests may share theirs."""
STOP_S = 15.0

_MARK = "CLUSTER_TEST_MARK"
"""An environment variable that all processes of a cluster inherit."""


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def write_config(folder: Path, port: int, **args: Any) -> Path:
    """A Serve config like configs/cluster.yaml with other `args`."""
    config = yaml.safe_load((ROOT / "configs/cluster.yaml").read_text())
    config["http_options"] = {"host": HOST, "port": port}
    config["applications"][0]["args"] = args
    path = folder / f"cluster-{port}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def running(folder: Path, **args: Any) -> Iterator[ClusterProcess]:
    """A cluster with these `args`, ready to serve. It must end in time and leave nothing."""
    port = free_port()
    config = write_config(folder, port, **args)
    it = ClusterProcess(
        [str(BIN / "quire"), "serve", "--config", str(config)], port, folder / "log"
    )
    try:
        it.wait_ready()
        yield it
        seconds = it.stop(signal.SIGTERM)
        assert it.processes() == [], it.log()
        assert seconds < STOP_S, it.log()
    finally:
        it.kill()


class ClusterProcess:
    """`command` running, with everything it starts."""

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self.url = f"http://{HOST}:{port}"
        self._mark = uuid.uuid4().hex
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env=os.environ | {_MARK: self._mark},
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Until a request would be served; fails with the log where that does not come."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.log()
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.3)
        raise AssertionError(f"not ready after {READY_S:g} s: {self.log()}")

    def wait_replicas(self, count: int) -> None:
        """Until so many replicas have their model loaded: the first one makes it ready."""
        deadline = time.monotonic() + READY_S
        while len(httpx.get(f"{self.url}/health", timeout=5).json()["replicas"]) < count:
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.3)

    def stop(self, number: signal.Signals) -> float:
        """Signal the process; the seconds until it had ended. Kills what is left after a minute."""
        started = time.monotonic()
        self._process.send_signal(number)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
        return time.monotonic() - started

    def kill(self) -> None:
        """End whatever of this cluster still runs."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def processes(self) -> list[int]:
        """Pids of this cluster that still run."""
        wanted = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                alive = entry.name.isdecimal() and wanted in (entry / "environ").read_bytes()
            except OSError:  # it has ended in the meantime
                continue
            if alive:
                found.append(int(entry.name))
        return found

    def ray_environment(self) -> dict[str, str]:
        """The variables by which a driver proves that it may join the cluster."""
        (pid, *_) = self.pids("ServeReplica:quire:Ingress")
        lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        return dict(line.split("=", 1) for line in lines if line.startswith("RAY_AUTH_"))

    def ray_address(self) -> str:
        """Where a driver joins the cluster."""
        for pid in self.pids("--gcs-address="):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            if address := re.search(r"--gcs-address=([\w.]+:\d+)", command):
                return address[1]
        raise AssertionError("no process says where the cluster is")

    def pids(self, title: str) -> list[int]:
        """Those of its processes whose command line contains `title`."""
        found = []
        for pid in self.processes():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            except OSError:  # it has ended in the meantime
                continue
            if title in command:
                found.append(pid)
        return found

    def run_driver(self, script: str, *arguments: str) -> str:
        """A script beside this file joins the cluster, whose address is its first argument, and
        must succeed; what it printed."""
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests/e2e" / script), self.ray_address(), *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | self.ray_environment() | {"PYTHONPATH": str(ROOT)},
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    def log(self) -> str:
        """What was printed, the end of it."""
        return self._log.read_text(errors="replace")[-4000:]
