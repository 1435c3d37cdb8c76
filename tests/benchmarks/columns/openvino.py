"""OpenVINO GenAI's continuous batching, stepped in this process."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks.closed_loop import Progress, drive
from tests.benchmarks.measure import NotInstalledError, Serve, measure
from tests.benchmarks.plan import Plan, Say
from tests.benchmarks.prompts import Prompt

_KV_GIB = 2
_WEIGHTS = {"float32": "fp32", "bfloat16": "fp16"}
_PRECISION = {"float32": "f32", "bfloat16": "bf16"}


class _Pipeline:
    """Its ContinuousBatchingPipeline as the closed loop wants it."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._genai = importlib.import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = _KV_GIB
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 512
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            folder,
            scheduler,
            "CPU",
            {
                "INFERENCE_NUM_THREADS": plan.threads,
                "INFERENCE_PRECISION_HINT": _PRECISION[plan.dtype],
            },
        )
        self._handles: dict[int, Any] = {}

    def add(self, request_id: str, prompt: Prompt, new_tokens: int) -> None:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        number = int(request_id)
        self._handles[number] = self._pipeline.add_request(number, prompt.text, config)

    def step(self) -> Iterable[Progress]:
        self._pipeline.step()
        ended = self._genai.GenerationStatus.FINISHED
        progress = []
        for number, handle in list(self._handles.items()):
            tokens = 0
            while handle.can_read():
                tokens += sum(len(o.generated_ids) for o in handle.read().values())
            finished = handle.get_status() == ended
            if finished:
                del self._handles[number]
            progress.append(Progress(str(number), tokens, finished))
        return progress


@contextmanager
def start(plan: Plan) -> Iterator[Serve]:
    for package in ("openvino_genai", "optimum"):
        if importlib.util.find_spec(package) is None:
            raise NotInstalledError(package)
    folder = plan.scratch / "openvino"
    export = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
    export += ["--model", str(plan.folder), "--task", "text-generation-with-past"]
    export += ["--weight-format", _WEIGHTS[plan.dtype], str(folder)]
    subprocess.run(export, check=True)
    pipeline = _Pipeline(folder, plan)
    yield lambda run: drive(pipeline, run)


def report(plan: Plan, say: Say) -> dict[str, Any]:
    return measure(start, plan, say)
