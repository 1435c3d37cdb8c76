"""Builds the Serve application; `serve run` calls `build` with the config's `args`."""

# No `from __future__ import annotations`: Serve looks at the class in build's annotation.

import logging
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from cluster.config import ClusterConfig, check_environment, resolve_device, resolve_replicas
from cluster.follower import FollowLimits
from cluster.ingress import Ingress, IngressSettings
from replicas.deployment import Replica, ReplicaSettings
from replicas.models import sources

logger = logging.getLogger("ray.serve")

HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 15.0
INGRESS_DRAIN_S = 600.0
"""How long an ingress that was replaced by an upgrade may take to finish its streams, which cannot
move to another one as those of an engine can. It holds up no stop of the cluster: there the
proxies go first, and an ingress without clients ends at once."""
INGRESS_SLACK = 64
"""Requests beyond the limit that reach the ingress, so that it can answer 503 itself."""


def build(config: ClusterConfig) -> Application:
    """The ingress over its replicas, sized for the cluster that is connected.

    Raises:
        ConfigError, ModelSourceError: what can be refused before any model is loaded.
    """
    router = RequestRouterConfig(
        # A path, as Serve pickles a class with its module by value.
        request_router_class="router.serve_router:QuireRouter",  # type: ignore[arg-type]
        request_router_kwargs={"policy": config.router.policy},
    )
    return build_with(router, config)


def build_with(router: RequestRouterConfig, config: ClusterConfig) -> Application:
    """`build` with a router of one's own between ingress and replicas."""
    check_environment()
    sources.check_hf_kernels_absent()
    sources.resolve(config.model.source, config.model.revision)
    logger.info("effective configuration:\n%s", config.to_yaml())
    resources = ray.cluster_resources()
    cores, gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
    device = resolve_device(config, gpus)
    count, threads = resolve_replicas(config, cores, gpus)
    served_name = config.model.served_name or config.model.source
    scaling = config.replicas.autoscaling
    replicas = (
        serve.deployment()(Replica)
        .options(
            **_scale(config, count),
            max_ongoing_requests=config.limits.max_queued_requests,
            health_check_period_s=HEALTH_PERIOD_S,
            health_check_timeout_s=HEALTH_TIMEOUT_S,
            graceful_shutdown_timeout_s=config.replicas.drain_s,
            ray_actor_options={
                "num_cpus": config.replicas.cpus_per_replica,
                "num_gpus": 1 if device == "cuda" else 0,
                "runtime_env": {"env_vars": _openmp(threads)},
            },
            request_router_config=router,
        )
        .bind(
            ReplicaSettings(
                source=config.model.source,
                revision=config.model.revision,
                dtype=config.model.dtype,
                device=device,
                threads=threads,
                served_name=served_name,
                engine=config.engine,
            )
        )
    )
    return (
        serve.deployment()(Ingress)
        .options(
            max_ongoing_requests=config.limits.max_queued_requests + INGRESS_SLACK,
            graceful_shutdown_timeout_s=INGRESS_DRAIN_S,
            max_surge_percent=100,  # the new one is up before the old one takes no more
            ray_actor_options={"num_cpus": 0},
        )
        .bind(
            IngressSettings(
                source=config.model.source,
                revision=config.model.revision,
                served_name=served_name,
                limits=config.limits,
                recording=config.recording,
                may_sleep=scaling is not None and scaling.min == 0,
                follow=FollowLimits(
                    max_failovers=config.router.max_failovers,
                    patience_s=config.router.failover_patience_s,
                    max_moves=config.router.max_moves,
                    move_gain=config.router.move_gain,
                ),
            ),
            replicas,
        )
    )


def _scale(config: ClusterConfig, count: int) -> dict[str, Any]:
    """Deployment options: a fixed number of replicas, or one that follows the load."""
    scaling = config.replicas.autoscaling
    if scaling is None:
        return {"num_replicas": count}
    policy = AutoscalingPolicy(
        policy_function="cluster.autoscaling:PressurePolicy",
        policy_kwargs={
            "queue_s": scaling.target_queue_s,
            "kv_used": scaling.target_kv_used,
            "preemptions_per_s": scaling.max_preemptions_per_s,
        },
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scaling.min,
            max_replicas=scaling.max,
            initial_replicas=count,
            look_back_period_s=scaling.look_back_s,
            upscale_delay_s=scaling.up_delay_s,
            downscale_delay_s=scaling.down_delay_s,
            policy=policy,
        )
    }


def _openmp(threads: int) -> dict[str, str]:
    """OpenMP must be told before torch is loaded, hence through the process' environment."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
