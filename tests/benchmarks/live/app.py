"""Our application with another router between ingress and replicas."""

from __future__ import annotations

from typing import Any

from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster.app import build, build_with
from cluster.config import ClusterConfig

ROUTERS = {
    "Serve power of two": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
    "ray.serve.llm PrefixCacheAffinityRouter": "tests.benchmarks.live.affinity:AffinityRouter",
}
POLICIES = {"Quire prefix_aware": "prefix_aware", "Quire round_robin": "round_robin"}
NAMES = (*POLICIES, *ROUTERS)


def make(args: dict[str, Any]) -> Application:
    """For Serve: `router`, one of NAMES, and `cluster`, a ClusterConfig."""
    config = ClusterConfig.model_validate(args["cluster"])
    name = args["router"]
    if name in POLICIES:
        router = config.router.model_copy(update={"policy": POLICIES[name]})
        return build(config.model_copy(update={"router": router}))
    return build_with(
        RequestRouterConfig(request_router_class=ROUTERS[name]),  # type: ignore[arg-type]
        config,
    )
