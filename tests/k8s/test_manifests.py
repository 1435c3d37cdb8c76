"""The Kubernetes manifests against KubeRay's schema, Serve's and ours.

Overlays are rendered here, so that the test needs no kustomize; where one is installed, the
rendering is compared with its.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
import yaml
from jsonschema import Draft202012Validator
from ray.serve.schema import ServeDeploySchema

from cluster.config import ClusterConfig, resolve_replicas
from cluster.serve_config import parse_serve_config

ROOT = Path(__file__).parents[2]
KUBERAY = ROOT.parent / "shared" / "kuberay"
FOLDERS = sorted(path.parent for path in (ROOT / "k8s").rglob("kustomization.yaml"))

all_folders = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
with_kuberay = pytest.mark.skipif(
    not KUBERAY.is_dir(), reason="KubeRay's schemas are not beside the project (../shared/kuberay)"
)


def render(folder: Path) -> list[dict[str, Any]]:
    """What `kustomize build` makes of the few features our manifests use."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert kustomization.keys() <= {"apiVersion", "kind", "resources", "patches"}
    documents: list[dict[str, Any]] = []
    for resource in kustomization["resources"]:
        path = (folder / resource).resolve()
        documents += render(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for patch in kustomization.get("patches", []):
        assert patch.keys() == {"path", "target"}
        matching = [document for document in documents if _is_target(document, patch["target"])]
        assert matching, f"{patch['path']} patches nothing"
        operations = jsonpatch.JsonPatch(yaml.safe_load((folder / patch["path"]).read_text()))
        for document in matching:
            operations.apply(document, in_place=True)
    return documents


def _is_target(document: dict[str, Any], target: dict[str, str]) -> bool:
    group, _, version = document["apiVersion"].rpartition("/")
    identity = {
        "group": group,
        "version": version,
        "kind": document["kind"],
        "name": document["metadata"]["name"],
    }
    assert target.keys() <= identity.keys()
    return target.items() <= identity.items()


def _ray_service(folder: Path) -> dict[str, Any]:
    (document,) = render(folder)
    return document


def _serve_config(folder: Path) -> ClusterConfig:
    text = _ray_service(folder)["spec"]["serveConfigV2"]
    return parse_serve_config(text, f"{folder.name}: serveConfigV2")[1]


def _close(schema: Any) -> Any:
    """The schema with unknown keys refused, as the API server's strict validation does."""
    if isinstance(schema, list):
        return [_close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _close(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        closed.pop("type", None)
        closed.pop("pattern", None)
    if isinstance(schema.get("properties"), dict) and not schema.get(
        "x-kubernetes-preserve-unknown-fields"
    ):
        closed["additionalProperties"] = False
    return closed


@functools.cache
def _validator() -> Draft202012Validator:
    schema = _close(json.loads((KUBERAY / "RayService-v1.schema.json").read_text()))
    # The API server checks metadata itself; here it is any object.
    assert schema["properties"]["metadata"] == {"type": "object"}
    return Draft202012Validator(schema)


def _errors(document: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in _validator().iter_errors(document)]


def test_the_base_and_both_overlays_are_there() -> None:
    assert [folder.name for folder in FOLDERS] == ["base", "cpu-demo", "gpu"]


@with_kuberay
@all_folders
def test_it_is_a_ray_service_without_a_typo(folder: Path) -> None:
    document = _ray_service(folder)
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayService")
    assert _errors(document) == []


@with_kuberay
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("/spec/serveConfig", "x"),
        ("/spec/rayClusterConfig/workerGroupSpecs/0/replica", 1),
        ("/spec/rayClusterConfig/workerGroupSpecs/0/replicas", "1"),
        ("/spec/rayClusterConfig/headGroupSpec/template/spec/containers/0/resource", {}),
        ("/spec/rayClusterConfig/headGroupSpec/rayStartParams/num-cpus", 0),
    ],
)
def test_a_typo_would_be_found(path: str, value: Any) -> None:
    document = _ray_service(ROOT / "k8s" / "base")
    jsonpatch.JsonPatch([{"op": "add", "path": path, "value": value}]).apply(document, True)
    assert len(_errors(document)) == 1


@all_folders
def test_its_serve_config_is_ours_and_serves(folder: Path) -> None:
    text = _ray_service(folder)["spec"]["serveConfigV2"]
    document, _ = parse_serve_config(text, "serveConfigV2")
    (application,) = ServeDeploySchema.model_validate(document).applications
    assert application.route_prefix == "/"
    assert document["http_options"] == {"host": "0.0.0.0", "port": 8000}, "reachable from outside"


@all_folders
def test_its_replicas_fit_its_workers(folder: Path) -> None:
    config = _serve_config(folder)
    (workers,) = _ray_service(folder)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    (container,) = workers["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert container["resources"]["requests"] == limits, "workers' memory and cores are their own"

    count, threads = config.replicas.count, config.replicas.threads
    assert isinstance(count, int)
    assert isinstance(threads, int), "explicit: nothing to derive them from before workers join"
    assert resolve_replicas(config, cores=0, gpus=0) == (count, threads)
    assert config.replicas.cpus_per_replica == threads, "Ray spreads them by what they use"
    a_worker = -(-count // workers["replicas"])
    assert a_worker * threads <= int(limits["cpu"])
    gpus = int(limits.get("nvidia.com/gpu", 0))
    assert (gpus > 0) == (config.model.device == "cuda")
    if gpus:
        assert a_worker <= gpus
    else:
        memory = int(limits["memory"].removesuffix("Gi"))
        assert a_worker * config.engine.kv_cache_memory_gib < memory / 2


@all_folders
def test_pods_get_no_variables_that_we_would_refuse(folder: Path) -> None:
    cluster = _ray_service(folder)["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert group["template"]["spec"]["enableServiceLinks"] is False


def test_ray_is_the_version_we_test_with() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    version = _ray_service(ROOT / "k8s" / "base")["spec"]["rayClusterConfig"]["rayVersion"]
    assert f"ray=={version}" in pins
    assert f"rayproject/ray:{version}-py3" in (ROOT / "k8s" / "Dockerfile").read_text()


@all_folders
def test_it_is_rendered_as_kustomize_would(folder: Path) -> None:
    if shutil.which("kustomize"):
        command = ["kustomize", "build", str(folder)]
    elif shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(folder)]
    else:
        pytest.skip("neither kustomize nor kubectl is installed")
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert list(yaml.safe_load_all(result.stdout)) == render(folder)
