"""The `quire` command."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster import simulate_options
from cluster.config_errors import ConfigError

_DEFAULT_CONFIG = Path("configs/cluster.yaml")
_FAILURE = 1
_USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, 1 for a failure, 2 for a mistake in the call."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except ConfigError as error:
        for problem in error.problems:
            _say(problem)
        return _USAGE_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire",
        description="Serve language models on a Ray cluster behind an OpenAI-compatible API.",
        allow_abbrev=False,
    )
    version = importlib.metadata.version("quire")
    parser.add_argument("--version", action="version", version=f"quire {version}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="start the cluster and serve until stopped",
        description="Start the cluster of a Serve config in the foreground. Ctrl-C stops it.",
        allow_abbrev=False,
    )
    serve.add_argument(
        "--config",
        type=Path,
        default=_DEFAULT_CONFIG,
        metavar="FILE",
        help="Serve config (default: %(default)s)",
    )
    serve.add_argument("--host", help="address to listen on instead of the config's")
    serve.add_argument("--port", type=_port, help="port to listen on instead of the config's")
    serve.set_defaults(run=_serve)

    check = commands.add_parser(
        "check",
        help="validate a config strictly and print what is in effect",
        description="Validate a Serve config strictly: every unknown or misplaced key and every "
        "refused value is named on a line of its own (exit status 2). A valid config is printed "
        "with its defaults filled in.",
        allow_abbrev=False,
    )
    check.add_argument("config", type=Path, metavar="CONFIG", help="Serve config file")
    check.set_defaults(run=_check)

    prepare = commands.add_parser(
        "prepare",
        help="fetch and convert a model ahead of serving it",
        description="Bring a model into the local cache, converted where it has to be, so that "
        "serving it later starts at once. Prints its folder.",
        allow_abbrev=False,
    )
    prepare.add_argument(
        "--source",
        default="embedded",
        help="embedded, a Hugging Face id, a local folder or a .gguf file (default: %(default)s)",
    )
    prepare.add_argument("--revision", help="branch, tag or commit of a Hugging Face id")
    prepare.set_defaults(run=_prepare)

    simulate = commands.add_parser(
        "simulate",
        help="replay a trace over simulated replicas, to size a cluster or compare policies",
        description="Replay a trace over simulated replicas: the real placement, scheduling, "
        "prefix cache and host tier, over a device that computes nothing and a clock that a "
        "roofline model of the GPU advances. Its latencies are estimates, good for comparisons.",
        allow_abbrev=False,
    )
    simulate_options.configure(simulate)
    simulate.set_defaults(run=_simulate)
    return parser


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else 0
    if not 1 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is refused; allowed: a port from 1 to 65535")
    return port


# The commands import what they run: `quire --help` need not wait for Ray or torch.


def _serve(options: argparse.Namespace) -> int:
    from cluster.serve import run

    return run(options.config, options.host, options.port)


def _check(options: argparse.Namespace) -> int:
    from cluster.serve_config import load_serve_config

    _, config = load_serve_config(options.config)
    print(f"{options.config}: OK\n\n{config.to_yaml()}", end="")
    return 0


def _prepare(options: argparse.Namespace) -> int:
    from cluster.config import check_environment
    from replicas.models.errors import ModelSourceError, UnsupportedArchitectureError
    from replicas.models.sources import resolve

    check_environment()
    try:
        print(resolve(options.source, options.revision, progress=_say))
    except (ModelSourceError, UnsupportedArchitectureError) as error:
        _say(str(error))
        return _FAILURE
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from cluster.simulate import run

    try:
        return run(options)
    except KeyboardInterrupt:
        _say("interrupted")
        return _FAILURE


def _say(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
