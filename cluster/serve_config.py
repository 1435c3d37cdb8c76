"""Reads a Serve config file strictly: Serve itself ignores unknown keys at every level."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, create_model

from cluster.config import ClusterConfig, check_environment
from cluster.config_errors import ConfigError, explain, join
from cluster.known_keys import Section

IMPORT_PATH = "cluster.app:build"
_ARGS = "applications[0].args"


def load_serve_config(path: Path | str) -> tuple[dict[str, Any], ClusterConfig]:
    """The file as Serve takes it, and the cluster its one application asks for.

    Raises:
        ConfigError: the file cannot be read, or anything in it or in the environment would
            be ignored or refused later.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    return parse_serve_config(text, str(path))


def parse_serve_config(text: str, name: str) -> tuple[dict[str, Any], ClusterConfig]:
    """`load_serve_config` of a text, such as a RayService's serveConfigV2.

    Args:
        name: what YAML errors call the text.
    """
    check_environment()
    document = _parse_yaml(text, name)
    config, problems = _read_application(document.get("applications"))
    problems = _check_serve(document, problems)
    if config is None or problems:
        raise ConfigError(problems)
    return document, config


def _check_serve(document: dict[str, Any], problems: list[str]) -> list[str]:
    """Add to `problems` what Serve would ignore or refuse."""
    # Seconds of import time, which a file that is not even YAML need not wait for.
    from ray.runtime_env import RuntimeEnv
    from ray.serve.schema import ServeDeploySchema

    options = {name: (Any, None) for name in RuntimeEnv.known_fields if name[0] != "_"}
    runtime_env = create_model("RuntimeEnv", **options)  # type: ignore[call-overload]
    known = Section.of(
        ServeDeploySchema,
        replace={
            "applications[].args": ClusterConfig,
            "applications[].runtime_env": runtime_env,
            "applications[].deployments[].ray_actor_options.runtime_env": runtime_env,
        },
    )
    places = {problem.partition(": ")[0] for problem in problems}
    problems = known.problems(document) + problems
    try:
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        for problem in error.errors():
            place = join("", *problem["loc"]) or "applications"
            if place not in places:
                problems.append(f"{place}: {problem['msg']}")
    return problems


def _read_application(applications: object) -> tuple[ClusterConfig | None, list[str]]:
    if not (isinstance(applications, list) and len(applications) == 1):
        return None, ["applications: give exactly one, Quire's"]
    application = applications[0]
    if not isinstance(application, dict):
        return None, ["applications[0]: is not a mapping"]
    problems = []
    if application.get("import_path") != IMPORT_PATH:
        problems.append(
            f"applications[0].import_path: {application.get('import_path')!r} is refused; "
            f"allowed: {IMPORT_PATH!r}"
        )
    args = application.get("args", {})
    try:
        return ClusterConfig.model_validate(args), problems
    except ValidationError as error:
        return None, problems + explain(error, ClusterConfig, _ARGS)


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses a mapping with the same key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, str) else None)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, name: str) -> dict[str, Any]:
    try:
        document = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError([f"{name}{line}: {error.problem}"]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{name}: {error}"]) from error
    if not isinstance(document, dict):
        raise ConfigError([f"{name}: is not a mapping with `applications:`"])
    return document
