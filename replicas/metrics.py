"""One replica's Prometheus metrics, under the names that dashboards already read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Histogram
from prometheus_client.metrics_core import Metric

from replicas.core.scheduler_output import FinishedChoice, StepOutcome
from replicas.core.scheduler_stats import SchedulerStats
from replicas.metric_families import MetricFamilies
from replicas.preemption_metrics import PreemptionMetrics
from replicas.protocol import EngineInfo, ReplicaSnapshot

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
_PREEMPTIONS = (0, 1, 2, 3, 4, 5, 10, 20)
"""With a bucket for 0: else a request never preempted looks like one preempted once."""


class EngineMetrics:
    """Observes steps; `collect` gives everything as Prometheus metric families."""

    def __init__(self, model_name: str, replica_id: str, info: EngineInfo) -> None:
        self._families = MetricFamilies(model_name, replica_id)
        self._preemption = PreemptionMetrics(self._families, info)
        self._info = info
        self._snapshot = ReplicaSnapshot()
        self._stats = SchedulerStats()
        lengths = _one_two_five(info.max_model_len)
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token",
            _FIRST_TOKEN_S,
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a choice", _TOKEN_S
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean over a choice's later tokens", _TOKEN_S
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token", _REQUEST_S
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From arrival to the first computed token", _REQUEST_S
        )
        self._inference = self._histogram(
            "request_inference_time_seconds",
            "From the first computed to the last token",
            _REQUEST_S,
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds",
            "From the first computed to the first new token",
            _REQUEST_S,
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first to the last new token", _REQUEST_S
        )
        self._prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a choice", lengths
        )
        self._output_length = self._histogram(
            "request_generation_tokens", "Output tokens of a choice", lengths
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens of a choice", lengths
        )
        self._preemptions = self._histogram(
            "request_num_preemptions", "Preemptions of a choice", _PREEMPTIONS
        )
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in a step", _STEP_TOKENS
        )

    def observe(
        self, outcome: StepOutcome, snapshot: ReplicaSnapshot, stats: SchedulerStats
    ) -> None:
        """Take in one step; `snapshot` and `stats` are the engine's after it."""
        computed = stats.computed_tokens - self._stats.computed_tokens
        if computed:
            self._step_tokens.observe(computed)
        self._snapshot, self._stats = snapshot, stats
        for seconds in outcome.first_token_s:
            self._first_token.observe(seconds)
        for seconds in outcome.inter_token_s:
            self._inter_token.observe(seconds)
        self._preemption.observe(outcome.resumed)
        for choice in outcome.finished:
            self._observe_finished(choice)

    def collect(self) -> list[Metric]:
        """All families as they stand; plain values that can be pickled."""
        return [
            *self._gauges(),
            *self._counters(),
            *self._preemption.collect(self._snapshot, self._stats),
            *self._families.collect(),
        ]

    def _observe_finished(self, choice: FinishedChoice) -> None:
        self._e2e.observe(choice.e2e_s)
        self._queue.observe(choice.queue_s)
        self._inference.observe(choice.prefill_s + choice.decode_s)
        self._prefill.observe(choice.prefill_s)
        self._decode.observe(choice.decode_s)
        self._prompt_length.observe(choice.num_prompt_tokens)
        self._output_length.observe(choice.num_output_tokens)
        self._max_tokens.observe(choice.max_tokens)
        self._preemptions.observe(choice.preemptions)
        if choice.num_output_tokens > 1:
            self._per_token.observe(choice.decode_s / (choice.num_output_tokens - 1))

    def _gauges(self) -> Iterator[Metric]:
        snapshot, info = self._snapshot, self._info
        used = snapshot.used_blocks / info.num_blocks
        for name, text, value in (
            ("num_requests_running", "Choices that hold KV blocks", snapshot.running),
            ("num_requests_waiting", "Choices that wait for room", snapshot.waiting),
            ("kv_cache_usage_perc", "Used share of the pool, 0-1", used),
        ):
            yield self._families.gauge(f"vllm:{name}", text, value)
        yield self._families.info(
            "vllm:cache_config",
            "The KV pool's shape",
            {
                "block_size": info.block_size,
                "num_gpu_blocks": info.num_blocks,
                "host_blocks": info.host_blocks,
                "cache_dtype": info.kv_dtype,
            },
        )

    def _counters(self) -> Iterator[Metric]:
        stats = self._stats
        cached = stats.prefix_cache_hits + stats.host_cache_hits
        for name, text, value in (
            ("num_preemptions", "Preempted choices", stats.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found on the device", stats.prefix_cache_hits),
            ("prompt_tokens", "Prompt tokens served", stats.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens found on the device or the host", cached),
            ("generation_tokens", "Output tokens", stats.generation_tokens),
        ):
            yield self._families.counter(f"vllm:{name}", text, value)
        yield self._families.counters(
            "vllm:request_success",
            "Ended choices by reason",
            "finished_reason",
            {reason.value: count for reason, count in stats.finished.items()},
        )

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return self._families.histogram(f"vllm:{name}", text, buckets)


def _one_two_five(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the first that reaches `limit`."""
    series: list[int] = []
    power = 1
    while True:
        for factor in (1, 2, 5):
            series.append(factor * power)
            if series[-1] >= limit:
                return tuple(series)
        power *= 10
