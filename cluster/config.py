"""What a Quire cluster may be told, and the only place that reads the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cluster.config_errors import ConfigError
from replicas.config import EngineConfig

_PREFIX = "QUIRE_"
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)$")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")

Auto = Literal["auto"]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class ModelConfig(_Section):
    """Which model is served, and how its weights are held."""

    source: Annotated[str, Field(min_length=1)] = "embedded"
    """`embedded` (SmolLM2-135M-Instruct), a Hugging Face id, a local folder or a .gguf file."""
    revision: Annotated[str, Field(min_length=1)] | None = None
    """Branch, tag or commit of a Hugging Face id; null takes its default branch."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type of the weights; auto is bfloat16 where the machine is fast at it."""
    served_name: Annotated[str, Field(min_length=1)] | None = None
    """The `model` clients ask for; null takes `source`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where replicas run; auto takes GPUs where the cluster has some."""


class RouterConfig(_Section):
    """How requests are placed on replicas."""

    policy: Literal["round_robin", "least_loaded", "power_of_two", "prefix_aware"] = "prefix_aware"
    """prefix_aware prefers the replica that holds the prompt's KV, waiting time considered."""
    max_failovers: Annotated[int, Field(ge=0, le=100)] = 3
    """Times in a row that a request whose replica was lost goes on elsewhere, before it fails. The
    count starts anew once the request has got 64 tokens a choice since its last loss, so that a
    long stream outlives any number of replicas that go as planned."""
    failover_patience_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 60.0
    """Seconds that such a request waits for another replica to take it."""
    max_moves: Annotated[int, Field(ge=0, le=100)] = 2
    """Times that a preempted request may leave a replica which stays full; 0 lets it wait."""
    move_gain: Annotated[float, Field(ge=1.0, le=100.0)] = 2.0
    """How many times longer its wait must be than going on elsewhere, for it to leave."""


class AutoscalingConfig(_Section):
    """Between which bounds the number of replicas follows the load, and how."""

    min: Annotated[int, Field(ge=0, le=1024)] = 1
    """Replicas at the least. With 0 the first request after a quiet time waits for one."""
    max: Annotated[int, Field(ge=1, le=1024)]
    """Replicas at the most."""
    target_queue_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 2.0
    """Seconds of prefill that may wait at a replica, by its own measured rate."""
    target_kv_used: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Share of a replica's KV pool that requests may hold."""
    max_preemptions_per_s: Annotated[float, Field(gt=0.0, le=1000.0)] = 0.1
    """Preemptions a second of a replica above which there is to be one replica more."""
    look_back_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 10.0
    """Seconds over which what a replica bears is averaged."""
    up_delay_s: Annotated[float, Field(ge=0.0, le=86400.0)] = 10.0
    """Seconds for which more replicas must have been wanted."""
    down_delay_s: Annotated[float, Field(ge=0.0, le=86400.0)] = 300.0
    """Seconds for which fewer replicas must have been wanted."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is greater than max {self.max}")
        return self


class ReplicasConfig(_Section):
    """How many replicas there are and what of a machine each takes."""

    count: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    """Replicas; auto is one a GPU, or on CPU two (one where there is a single core)."""
    threads: Annotated[int, Field(ge=1, le=1024)] | Auto = "auto"
    """Compute threads of each replica; auto shares the cores out evenly."""
    cpus_per_replica: Annotated[float, Field(ge=0.0, le=1024.0)] = 0.0
    """Cores that Ray reserves for each replica. 0 by default: a reservation does not bound
    what a replica uses (`threads` does), and on two cores two replicas with a core each
    would leave none for anything else in the cluster. Where replicas spread over several
    machines, set it to the value of `threads`."""
    drain_s: Annotated[float, Field(ge=0.0, le=86400.0)] = 5.0
    """Seconds in which a replica that is to go may finish what runs on it; what is not done by
    then goes on at another replica. The cluster takes as long to stop."""
    autoscaling: AutoscalingConfig | None = None
    """Lets the number of replicas follow the load, from `count` on; null keeps it."""


class LimitsConfig(_Section):
    """What an ingress accepts before it refuses."""

    max_queued_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Requests that may be in work or waiting at one ingress; the next one gets 503 with
    Retry-After."""
    max_body_mib: Annotated[float, Field(gt=0.0, le=1024.0)] = 8.0
    """MiB of a request's body; a larger one gets 413."""
    max_batch_prompts: Annotated[int, Field(ge=1, le=4096)] = 256
    """Prompts in one completion request."""
    max_choices: Annotated[int, Field(ge=1, le=65536)] = 2048
    """Choices in one request: its prompts times `n`."""
    request_timeout_s: Annotated[float, Field(gt=0.0, le=86400.0)] | None = None
    """Seconds that a request may take from its arrival, waiting included, before it ends with an
    error; a client may ask for less with `timeout_s`. null sets no limit."""


class RecordingConfig(_Section):
    """A trace of what clients ask for, without what they say, for `quire simulate`."""

    folder: Annotated[str, Field(min_length=1)]
    """Where each ingress writes a file of its own, in Mooncake's format: times, lengths and
    block numbers that only tell which prompts began alike. An absolute path on its machine."""
    max_mib: Annotated[float, Field(gt=0.0, le=1_048_576.0)] = 256.0
    """MiB of a file; recording is over when it is full."""

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, value: str) -> str:
        if not value.startswith("/"):
            raise ValueError(f"{value!r} is not an absolute path")
        return value


class ClusterConfig(_Section):
    """Everything under `args:` of a Serve config whose import_path is `cluster.app:build`."""

    model: ModelConfig = ModelConfig()
    """Which model is served."""
    engine: EngineConfig = EngineConfig()
    """Sizes, policies and memory of each replica's engine."""
    router: RouterConfig = RouterConfig()
    """The policy that places requests on replicas."""
    replicas: ReplicasConfig = ReplicasConfig()
    """How many replicas there are."""
    limits: LimitsConfig = LimitsConfig()
    """What an ingress accepts."""
    recording: RecordingConfig | None = None
    """Whether a trace is recorded, and where; null records none."""

    def to_yaml(self) -> str:
        """Every option as it is in effect, defaults filled in."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False)


def resolve_device(config: ClusterConfig, gpus: int) -> Literal["cpu", "cuda"]:
    """The device replicas run on, in a cluster with `gpus` GPUs.

    Raises:
        ConfigError: Triton's kernels are asked for without a GPU to run them.
    """
    device = config.model.device
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device == "cpu" and config.engine.kernel_backend == "triton":
        problem = "'triton' needs a GPU, and replicas run on the CPU; allowed here: 'auto', 'torch'"
        raise ConfigError([f"engine.kernel_backend: {problem}"])
    return device


def resolve_replicas(config: ClusterConfig, cores: int, gpus: int) -> tuple[int, int]:
    """(replicas, threads of each) for a cluster with `cores` CPU cores and `gpus` GPUs.

    With autoscaling, the replicas to begin with; their threads are shared out for the most that
    there may be.

    Raises:
        ConfigError: the replicas are to run on GPUs, their count is auto, and there is no GPU.
    """
    count, threads = _replica_count(config, cores, gpus), config.replicas.threads
    scaling = config.replicas.autoscaling
    if scaling is not None:
        count = min(max(count, scaling.min), scaling.max)
    even_share = max(1, cores // (count if scaling is None else scaling.max))
    return count, even_share if threads == "auto" else threads


def _replica_count(config: ClusterConfig, cores: int, gpus: int) -> int:
    count, threads = config.replicas.count, config.replicas.threads
    if count != "auto":
        return count
    if resolve_device(config, gpus) == "cpu":
        return max(1, min(2, cores if threads == "auto" else cores // threads))
    if gpus:
        return gpus
    raise ConfigError(["model.device: 'cuda', but the cluster has no GPU; allowed here: 'cpu'"])


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Refuse variables that look like Quire's: it has none, so each is a mistake.

    Args:
        environ: name to value; None takes the process' environment.

    Raises:
        ConfigError: a variable's name begins with QUIRE_. Those that Kubernetes sets for a
            Service whose name begins with `quire` are let through.
    """
    variables = os.environ if environ is None else environ
    problems = [
        f"environment variable {name}: not known, since Quire reads no {_PREFIX} variables; "
        "set options in the config file"
        for name, value in sorted(variables.items())
        if name.startswith(_PREFIX) and not _is_service_link(name, value)
    ]
    if problems:
        raise ConfigError(problems)


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.search(name)) or bool(_SERVICE_URL.match(value))
