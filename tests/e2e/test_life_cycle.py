"""Starting and stopping: errors in one line, Serve's own command, Ctrl-C."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster_process import (
    BIN,
    HOST,
    MODEL,
    ROOT,
    STOP_S,
    ClusterProcess,
    free_port,
    write_config,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def refused(config: Path) -> str:
    """What `quire serve` prints for a config that it must refuse before it loads anything."""
    done = subprocess.run(
        [str(BIN / "quire"), "serve", "--config", str(config)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=100,
        check=False,
    )
    assert done.returncode not in (0, -signal.SIGABRT), done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"{HOST}:{port}" in refused(write_config(tmp_path, port))


def test_a_missing_model_folder_is_named(tmp_path: Path) -> None:
    config = write_config(tmp_path, free_port(), model={"source": "./no/such/folder"})
    assert "./no/such/folder" in refused(config)


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"architectures": ["BloomForCausalLM"], "model_type": "bloom"})
    )
    (model / "model.safetensors").write_bytes(b"")
    config = write_config(tmp_path, free_port(), model={"source": str(model)})
    assert "BloomForCausalLM" in refused(config)


def test_a_misspelt_key_is_named_with_its_neighbour(tmp_path: Path) -> None:
    config = write_config(tmp_path, free_port(), engine={"block_sise": 16})
    line = refused(config)
    assert "block_sise" in line
    assert "block_size" in line


@pytest.mark.parametrize(
    ("command", "number"),
    [(["quire", "serve", "--config"], signal.SIGINT), (["serve", "run"], signal.SIGTERM)],
    ids=["quire serve, Ctrl-C", "serve run"],
)
def test_starts_serves_and_stops(
    tmp_path: Path, command: list[str], number: signal.Signals
) -> None:
    port = free_port()
    config = write_config(
        tmp_path, port, replicas={"count": 1, "threads": 1}, engine={"kv_cache_memory_gib": 0.1}
    )
    line = [str(BIN / command[0]), *command[1:], str(config)]
    cluster = ClusterProcess(line, port, tmp_path / "log")
    try:
        cluster.wait_ready()
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=100)
        assert answer.json()["usage"]["completion_tokens"] <= 4
        body |= {"stream": True, "max_tokens": 2000, "ignore_eos": True}
        url = f"{cluster.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=100) as unfinished:
            next(unfinished.iter_lines())
            seconds = cluster.stop(number)
        deadline = time.monotonic() + STOP_S - seconds
        while cluster.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert cluster.processes() == [], cluster.log()
        assert seconds < STOP_S, cluster.log()
    finally:
        cluster.kill()
