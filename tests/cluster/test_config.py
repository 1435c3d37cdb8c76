"""ClusterConfig, what it resolves to, and the environment."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import ClusterConfig, check_environment, resolve_device, resolve_replicas
from cluster.config_errors import ConfigError


def _config(device: str = "auto", **replicas: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"model": {"device": device}, "replicas": replicas})


@pytest.mark.parametrize(
    ("cores", "gpus", "expected"),
    [
        (1, 0, (1, 1)),
        (2, 0, (2, 1)),
        (3, 0, (2, 1)),
        (4, 0, (2, 2)),
        (16, 0, (2, 8)),
        (16, 1, (1, 16)),
        (16, 4, (4, 4)),
        (2, 8, (8, 1)),
    ],
)
def test_auto_follows_the_machine(cores: int, gpus: int, expected: tuple[int, int]) -> None:
    assert resolve_replicas(_config(), cores, gpus) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"count": 1}, (1, 4)),
        ({"count": 3}, (3, 1)),
        ({"count": 8}, (8, 1)),
        ({"threads": 1}, (2, 1)),
        ({"threads": 4}, (1, 4)),
        ({"threads": 9}, (1, 9)),
        ({"count": 5, "threads": 2}, (5, 2)),
    ],
)
def test_what_is_given_stands(options: dict[str, Any], expected: tuple[int, int]) -> None:
    assert resolve_replicas(_config(**options), cores=4, gpus=0) == expected


def test_the_device_may_be_chosen() -> None:
    assert resolve_device(_config(), gpus=0) == "cpu"
    assert resolve_device(_config(), gpus=2) == "cuda"
    assert resolve_device(_config("cpu"), gpus=2) == "cpu"
    assert resolve_replicas(_config("cpu"), cores=2, gpus=4) == (2, 1)


def test_triton_without_a_gpu_is_refused_by_name() -> None:
    config = ClusterConfig.model_validate({"engine": {"kernel_backend": "triton"}})
    assert resolve_device(config, gpus=1) == "cuda"
    with pytest.raises(ConfigError, match=r"engine\.kernel_backend: 'triton' needs a GPU"):
        resolve_device(config, gpus=0)


def test_a_missing_gpu_is_named_unless_the_count_says_they_will_come() -> None:
    with pytest.raises(ConfigError, match=r"model\.device: 'cuda', but the cluster has no GPU"):
        resolve_replicas(_config("cuda"), cores=2, gpus=0)
    assert resolve_replicas(_config("cuda", count=2, threads=4), cores=2, gpus=0) == (2, 4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"autoscaling": {"max": 4}}, (2, 1)),
        ({"autoscaling": {"max": 1}}, (1, 4)),
        ({"autoscaling": {"min": 3, "max": 4}}, (3, 1)),
        ({"count": 1, "autoscaling": {"max": 2}}, (1, 2)),
        ({"count": 9, "autoscaling": {"max": 2}, "threads": 3}, (2, 3)),
    ],
)
def test_autoscaling_begins_within_its_bounds_and_shares_cores_for_the_most(
    options: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert resolve_replicas(_config(**options), cores=4, gpus=0) == expected


def test_bounds_must_not_cross() -> None:
    with pytest.raises(ValueError, match="min 3 is greater than max 2"):
        _config(autoscaling={"min": 3, "max": 2})


def test_a_variable_with_our_prefix_is_a_mistake() -> None:
    with pytest.raises(ConfigError) as caught:
        check_environment({"QUIRE_PORT": "8000", "PATH": "/bin", "QUIRE_BLOCK_SIZE": "16"})
    first, second = caught.value.problems
    assert "QUIRE_BLOCK_SIZE" in first
    assert "QUIRE_PORT" in second
    check_environment({"PATH": "/bin", "MY_QUIRE_PORT": "1"})


def test_the_process_environment_is_the_one_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    check_environment()
    monkeypatch.setenv("QUIRE_DEBUG", "1")
    with pytest.raises(ConfigError, match="QUIRE_DEBUG"):
        check_environment()


def test_variables_that_kubernetes_sets_for_a_service_are_no_mistake() -> None:
    check_environment(
        {
            "QUIRE_SERVE_SVC_SERVICE_HOST": "10.0.0.1",
            "QUIRE_SERVE_SVC_SERVICE_PORT_SERVE": "8000",
            "QUIRE_SERVE_SVC_PORT": "tcp://10.0.0.1:8000",
            "QUIRE_SERVE_SVC_PORT_8000_TCP_ADDR": "10.0.0.1",
        }
    )


def test_every_option_says_what_it_means() -> None:
    schema = ClusterConfig.model_json_schema()
    silent = [
        f"{name}.{option}"
        for name, section in [("args", schema), *schema["$defs"].items()]
        for option, field in section["properties"].items()
        if not field.get("description")
    ]
    assert silent == []
