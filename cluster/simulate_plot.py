"""The results of `quire simulate` as a picture, where matplotlib is installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.config_errors import ConfigError
from cluster.simulate_table import Result


def check() -> None:
    """Refuse to plot before anything is simulated.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    _matplotlib()


def draw(path: Path, results: Sequence[Result]) -> None:
    """Write four panels to `path`: hit rate by tier, TTFT, goodput and imbalance.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure_class = _matplotlib().Figure
    figure = figure_class(figsize=(10, 7), layout="constrained")
    (hits, ttft), (goodput, imbalance) = figure.subplots(2, 2)
    names = [result.policy for result in results]
    reports = [result.report for result in results]
    device = [100 * report.device_hit_rate for report in reports]
    hits.bar(names, device, label="device")
    host = [100 * report.host_hit_rate for report in reports]
    hits.bar(names, host, bottom=device, label="host tier")
    hits.legend()
    hits.set_title("Prompt tokens found, %")
    for part in ("p99", "p90", "p50"):  # the tallest first, so that the others stay visible
        ttft.bar(names, [getattr(report.ttft_s, part) for report in reports], label=part)
    ttft.legend()
    ttft.set_title("Time to first token, s")
    goodput.bar(names, [report.goodput_rps for report in reports])
    goodput.set_title("Goodput, requests/s")
    imbalance.bar(names, [report.imbalance for report in reports])
    imbalance.set_title("Most requests of a replica over the mean")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError([f"--plot: {path}: cannot be written: {error.strerror}"]) from error


def _matplotlib() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            ["--plot: matplotlib is not installed; get it with: pip install 'quire[plot]'"]
        ) from error
