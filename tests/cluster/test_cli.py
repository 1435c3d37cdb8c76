"""The `quire` command: what it prints, and how it ends."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cluster.cli import main
from cluster.config import ClusterConfig
from cluster.config_errors import ConfigError
from replicas.models import sources

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "cluster.yaml")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Stands in for the module that starts the cluster; what it was called with."""
    seen: list[tuple[object, ...]] = []

    def run(config: Path, host: str | None, port: int | None) -> int:
        seen.append((config, host, port))
        if port == 1:
            raise ConfigError(["http_options.port: 1 is taken", "another"])
        return 0

    module = types.ModuleType("cluster.serve")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cluster.serve", module)
    return seen


def test_check_prints_the_effective_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", CONFIG]) == 0
    verdict, _, effective = capsys.readouterr().out.partition("\n\n")
    assert verdict == f"{CONFIG}: OK"
    config = ClusterConfig.model_validate(yaml.safe_load(effective))
    assert config.engine.min_progress_tokens == 8, "defaults are filled in"
    assert config.engine.kv_cache_memory_gib == 1.0


def test_check_names_every_mistake_on_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    text = Path(CONFIG).read_text().replace("max_num_seqs: 64", "max_num_seq: 64\n        swap: 1")
    path.write_text(text)
    assert main(["check", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[1].strip() for line in err.splitlines()] == [
        "applications[0].args.engine.max_num_seq",
        "applications[0].args.engine.swap",
    ]


def test_check_refuses_unknown_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_BLOCK_SIZE", "16")
    assert main(["check", CONFIG]) == 2
    assert "QUIRE_BLOCK_SIZE" in capsys.readouterr().err


def test_serve_passes_on_what_it_was_given(calls: list[tuple[object, ...]]) -> None:
    assert main(["serve"]) == 0
    assert main(["serve", "--config", CONFIG, "--host", "127.0.0.1", "--port", "8123"]) == 0
    assert calls == [
        (Path("configs/cluster.yaml"), None, None),
        (Path(CONFIG), "127.0.0.1", 8123),
    ]


@pytest.mark.usefixtures("calls")
def test_serve_reports_what_keeps_it_from_starting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "1"]) == 2
    assert capsys.readouterr().err == "quire: http_options.port: 1 is taken\nquire: another\n"


def test_prepare_prints_the_folder_of_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resolve(source: str, revision: str | None, *, progress: Callable[[str], None]) -> Path:
        progress(f"fetching {source}")
        return Path("/models") / source / str(revision)

    monkeypatch.setattr(sources, "resolve", resolve)
    assert main(["prepare"]) == 0
    assert main(["prepare", "--source", "a/b", "--revision", "main"]) == 0
    out, err = capsys.readouterr()
    assert out == "/models/embedded/None\n/models/a/b/main\n"
    assert err == "quire: fetching embedded\nquire: fetching a/b\n"


def test_prepare_says_in_one_line_what_is_wrong_with_a_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "nothing")
    assert main(["prepare", "--source", missing]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert missing in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--prot", "8000"], "--prot"),
        (["serve", "--block-size", "16"], "--block-size"),
        (["serve", "--por", "8000"], "--por"),
        (["serve", "--port", "0"], "a port from 1 to 65535"),
        (["serve", "--port", "65536"], "a port from 1 to 65535"),
        (["serve", "--port", "http"], "a port from 1 to 65535"),
        (["check"], "CONFIG"),
        (["check", CONFIG, "--strict"], "--strict"),
        (["chekc", CONFIG], "chekc"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_call_is_refused_by_name(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_the_installed_command_answers_without_loading_torch_or_ray() -> None:
    command = Path(sysconfig.get_path("scripts")) / "quire"
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == "quire 0.1.0\n"
    loaded = "import sys, cluster.cli; print({'ray', 'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
    )
    assert result.stdout == "set()\n"
