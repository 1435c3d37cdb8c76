"""The options of `quire simulate`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from router.placement import POLICIES
from router.simulator.hardware import HARDWARE
from router.simulator.models import MODELS

MAX_REPLICAS = 10_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser."""
    parser.add_argument(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="Mooncake jsonl (what `recording` writes too) or Azure csv",
    )
    parser.add_argument(
        "--replicas", type=_integer(1, MAX_REPLICAS), required=True, metavar="N", help="how many"
    )
    policies = parser.add_mutually_exclusive_group()
    policies.add_argument(
        "--policy",
        dest="policies",
        type=lambda text: [_policy(text)],
        default=["prefix_aware"],
        metavar="POLICY",
        help=f"one of {', '.join(POLICIES)} (default: prefix_aware)",
    )
    policies.add_argument(
        "--compare",
        dest="policies",
        type=_policies,
        metavar="POLICY,POLICY",
        help="several policies over the same trace",
    )
    _configure_load(parser)
    _configure_replicas(parser)
    _configure_output(parser)


def _configure_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    load.add_argument(
        "--speed",
        type=_number(0.0, 1e6),
        default=1.0,
        metavar="X",
        help="requests arrive X times as fast as in the trace (default: %(default)g)",
    )
    load.add_argument(
        "--limit-requests",
        type=_integer(1, 10**9),
        metavar="N",
        help="take the trace's first N requests (default: all)",
    )
    load.add_argument(
        "--block-size",
        type=_integer(1, 4096),
        metavar="TOKENS",
        help="what a hash id of the trace stands for, and a KV block of a replica "
        "(default: 512 for Mooncake's format, 64 for Azure's)",
    )
    load.add_argument(
        "--seed",
        type=_integer(0, 2**63 - 1),
        default=0,
        metavar="N",
        help="of what a policy draws (default: %(default)s)",
    )


def _configure_replicas(parser: argparse.ArgumentParser) -> None:
    replicas = parser.add_argument_group("each replica")
    replicas.add_argument(
        "--model",
        choices=MODELS,
        default="llama-3.1-8b",
        help="its shape (default: %(default)s)",
    )
    replicas.add_argument(
        "--gpu",
        choices=HARDWARE,
        default="h100",
        help="what it runs on; as many of them as the model needs (default: %(default)s)",
    )
    replicas.add_argument(
        "--kv-tokens",
        type=_integer(2, 10**9),
        metavar="TOKENS",
        help="size of the KV pool (default: what fits beside the weights)",
    )
    replicas.add_argument(
        "--swap-space",
        type=_number(0.0, 16384.0, zero=True),
        default=0.0,
        metavar="GIB",
        help="host memory of its host tier (default: %(default)g, none)",
    )
    replicas.add_argument(
        "--replicas-per-node",
        type=_integer(1, 64),
        default=1,
        metavar="N",
        help="of one machine: they read each other's host tiers (default: %(default)s)",
    )
    replicas.add_argument(
        "--max-num-seqs",
        type=_integer(1, 4096),
        default=256,
        metavar="N",
        help="choices that run at once (default: %(default)s)",
    )
    replicas.add_argument(
        "--max-num-batched-tokens",
        type=_integer(1, 262_144),
        default=4096,
        metavar="N",
        help="tokens of one step (default: %(default)s)",
    )
    replicas.add_argument(
        "--feed-delay",
        type=_number(0.0, 3600.0, zero=True),
        default=0.0,
        metavar="SECONDS",
        help="until the router knows of a step (default: %(default)g)",
    )


def _configure_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--ttft-limit",
        type=_number(0.0, 1e6),
        default=5.0,
        metavar="SECONDS",
        help="a good request has its first token within it (default: %(default)g)",
    )
    output.add_argument(
        "--itl-limit",
        type=_number(0.0, 1e6),
        default=0.1,
        metavar="SECONDS",
        help="and its tokens, on the mean, no further apart (default: %(default)g)",
    )
    output.add_argument("--json", action="store_true", help="an array with one object a policy")
    output.add_argument("--plot", type=_picture, metavar="OUT.png", help="draw a picture as well")


def _integer(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if not least <= value <= most:
            raise _refused(text, f"an integer from {least} to {most}")
        return value

    return parse


def _number(least: float, most: float, *, zero: bool = False) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least < value <= most or (zero and value == 0.0)):
            start = f"from {least:g}" if zero else f"above {least:g}"
            raise _refused(text, f"a number {start} and up to {most:g}")
        return value

    return parse


def _policies(text: str) -> Sequence[str]:
    names = [_policy(name.strip()) for name in text.split(",")]
    if len(set(names)) < len(names):
        raise _refused(text, "each policy once")
    return names


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise _refused(text, f"one of {', '.join(POLICIES)}")
    return text


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise _refused(text, "a file that ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise _refused(text, f"a file in a folder that exists, which {str(path.parent)!r} does not")
    return path


def _refused(text: str, allowed: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r} is refused; allowed: {allowed}")
