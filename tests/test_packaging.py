"""What installing Quire must not break."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers.utils import is_kernels_available

import kernels

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def _requirements(*groups: list[str]) -> dict[str, Requirement]:
    requirements = (Requirement(line) for group in groups for line in group)
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    assert Path(kernels.__file__).parent == ROOT / "kernels"
    assert not hasattr(kernels, "__version__")
    assert is_kernels_available() is False


def test_the_version_is_none_that_transformers_would_look_for() -> None:
    assert not metadata.version("quire").startswith("0.18.")


def test_every_package_we_import_is_required() -> None:
    ours = {"cluster", "router", "replicas", "kernels"}
    imported = {
        module.partition(".")[0]
        for package in ours
        for path in (ROOT / package).rglob("*.py")
        for module in _imports(path)
    }
    homes = metadata.packages_distributions()
    distributions = {
        canonicalize_name(homes[module][0]) for module in imported - ours - sys.stdlib_module_names
    }
    # pydantic requires exactly one version of its own core.
    required = _requirements(PROJECT["dependencies"], EXTRAS["embedded"])
    assert distributions - required.keys() <= {"pydantic-core"}


def test_every_requirement_but_triton_is_constrained_to_what_it_allows() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pairs}
    required = _requirements(PROJECT["dependencies"], *EXTRAS.values())
    for name in required.keys() & pins.keys():
        assert required[name].specifier.contains(pins[name]), name
    assert required.keys() - pins.keys() == {"triton"}, "torch's CUDA builds name their own"


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
