"""`make bench-live`: routers before the same replicas, on the real cluster, under the same load.

Each round serves every router in turn: a fresh cluster, then the load. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from replicas.models import sources
from tests.benchmarks import server
from tests.benchmarks.idleness import Idleness
from tests.benchmarks.live.app import NAMES

ROOT = Path(__file__).parents[3]
_START_S = 300.0
_MODEL = "embedded"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Exits with status 2 where an option is refused."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.live", description=__doc__)
    parser.add_argument("--load", type=Path, required=True, help="the load generator, load.py")
    parser.add_argument("--router", action="append", choices=NAMES, help="default: all")
    parser.add_argument("--rounds", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=96, help="(default: %(default)s)")
    parser.add_argument("--groups", type=int, default=8, help="prefixes (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=96, help="of KV a replica (%(default)s)")
    parser.add_argument("--json", type=Path, help="write all outcomes there too")
    parsed = parser.parse_args(arguments)
    if not parsed.load.is_file():
        parser.error(f"--load: there is no file {parsed.load}")
    return parsed


def main() -> int:
    """Prints a table of means over the rounds."""
    arguments = parse()
    names = arguments.router or NAMES
    folder = sources.resolve("embedded", None)
    outcomes: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            with tempfile.TemporaryDirectory() as scratch:
                idleness = Idleness.look(2.0)
                with _cluster(name, arguments, Path(scratch)) as url:
                    outcome = _load(url, folder, arguments)
            outcomes[name].append({"idle": str(idleness), **outcome})
            print(f"{name}: {json.dumps(_row([outcome]))} ({idleness})", file=sys.stderr)
    print(render({name: _row(found) for name, found in outcomes.items()}))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(outcomes, indent=2), encoding="utf-8")
    return 0


@contextmanager
def _cluster(name: str, arguments: argparse.Namespace, scratch: Path) -> Iterator[str]:
    cluster = {
        "model": {"source": "embedded", "served_name": _MODEL},
        "replicas": {"count": arguments.replicas, "threads": 1},
        "engine": {"num_gpu_blocks_override": arguments.blocks},
    }
    port = server.free_port()
    document = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": server.HOST, "port": port},
        "applications": [
            {
                "name": "quire",
                "route_prefix": "/",
                "import_path": "tests.benchmarks.live.app:make",
                "args": {"router": name, "cluster": cluster},
            }
        ],
    }
    config = scratch / "live.json"
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("serve")), "run", str(config)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    url = f"http://{server.HOST}:{port}"
    with server.running(command, url, scratch / "cluster.log", _START_S, env):
        yield url


def _load(url: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, str(arguments.load), "shared", "--url", url, "--model", _MODEL]
    command += ["--tokenizer", str(folder / "tokenizer.json")]
    command += ["--requests", str(arguments.requests), "--groups", str(arguments.groups)]
    command += ["--extra", json.dumps({"ignore_eos": True, "temperature": 0})]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def _row(outcomes: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the rounds."""
    return {
        "tok/s": fmean(each["output_tok_s"] for each in outcomes),
        "cached %": fmean(
            100 * each["cached_prompt_tokens"] / each["prompt_tokens"] for each in outcomes
        ),
        "TTFT mean s": fmean(each["ttft_ms"]["mean"] / 1000 for each in outcomes),
        "p99 s": fmean(each["ttft_ms"]["p99"] / 1000 for each in outcomes),
        "E2E mean s": fmean(each["e2e_ms"]["mean"] / 1000 for each in outcomes),
        "failed": sum(each["requests"] - each["ok"] for each in outcomes),
    }


def render(rows: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    columns = list(next(iter(rows.values())))
    lines = [f"| router | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        cells = (f"{value:.3g}" for value in row.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
