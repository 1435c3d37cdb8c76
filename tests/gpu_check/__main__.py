"""`make gpu-check`, or `python -m tests.gpu_check --help`.

Ends with 0 where everything passed, 1 where something did not, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

from tests.gpu_check import plan, table
from tests.gpu_check.results import SectionResult
from tests.gpu_check.rig import Rig
from tests.gpu_check.runner import run_all

_TOTAL_S = 525.0
"""Nine minutes, less what starting and stopping takes."""
_PRELOADED = (
    "torch",
    "triton",
    "torch.nn.attention.flex_attention",
    "transformers.models.llama.modeling_llama",
)
"""Imported once, before the sections are forked. None of them may touch the GPU by it."""
_FAILED, _NO_GPU = 1, 2


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = _parse()
    if arguments.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Tiny tensors gain nothing from more threads.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # torch then counts devices without making a context, which no fork would survive.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    begin = time.monotonic()
    if not arguments.dry and (problem := _no_gpu()):
        print(f"gpu-check: no GPU: {problem}; DRY=1 (--dry) runs the script without one")
        return _NO_GPU
    for module in _PRELOADED:
        with contextlib.suppress(ImportError):  # the sections that need it say so
            importlib.import_module(module)
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="quire-gpu-check-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"gpu-check: results in {folder}", flush=True)

    def tell(section: SectionResult) -> None:
        print(f"[{time.monotonic() - begin:5.1f} s] {table.line_of(section)}", flush=True)

    sections = plan.chosen(arguments.only)
    left = arguments.limit - (time.monotonic() - begin)
    results = run_all(sections, Rig(arguments.dry), folder, left, tell)
    report = table.render(results)
    (folder / "table.md").write_text(report + "\n")
    print(f"\n{report}")
    return 0 if results.fine else _FAILED


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.gpu_check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--out", type=Path, help="folder for results.json, logs and the table")
    parser.add_argument(
        "--only", action="append", default=[], choices=plan.names(), help="a section; repeatable"
    )
    parser.add_argument("--limit", type=float, default=_TOTAL_S, help="seconds for everything")
    return parser.parse_args()


def _no_gpu() -> str:
    """Why there is none; empty where there is. Asked in a child: the answer may start CUDA."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads: numpy's have nothing to do yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os._exit(0 if torch.cuda.is_available() else 1)
    found = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return "" if found else f"torch {torch.__version__} finds no CUDA device"


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a child that even SIGKILL does not end would be waited for
